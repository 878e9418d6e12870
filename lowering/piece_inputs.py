"""checker: one generated function that refuses inputs a piece was not compiled for, before anything of the piece runs.

Inductor asserts sizes only where it first reads a tensor: by then a cache may already be written. The function is
Python source made from the placeholders' meta: a dtype, a shape and a stride comparison an input, about 0.3 µs each. A
symbol gets its value from the first input that has it alone as a size; every other use of it must agree. Strides of
dimensions of size 1, and of empty tensors, mean nothing and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import SymInt, Tensor

from v41._compat import as_python, symbols_of
from v41.errors import PieceInputMismatch
from v41.text_code import define

Size = int | SymInt


def checker(piece: str, names: Sequence[str], metas: Sequence[object]) -> Callable[[Sequence[object]], None]:
    """A function over the piece's inputs that raises PieceInputMismatch, naming `piece` and the input, or returns."""
    known = bindings(metas)
    lines = ["def check(args):", f"    if len(args) != {len(metas)}:", "        miscounted(piece, args, names)"]
    lines += [f"    {symbol} = args[{index}]{axis}" for symbol, (index, axis) in known.items()]
    facts: dict[str, object] = {"refuse": _refuse, "miscounted": _miscounted, "same_strides": same_strides}
    facts |= {"piece": piece, "names": tuple(names)}
    for index, (name, meta) in enumerate(zip(names, metas, strict=True)):
        if not isinstance(meta, Tensor):
            continue
        shape, strides = _tuple(meta.shape, known, "a.shape"), _tuple(meta.stride(), known, "strides")
        facts |= {f"name{index}": name, f"dtype{index}": meta.dtype}
        lines += [
            f"    a = args[{index}]",
            "    strides = a.stride()",
            f"    if a.dtype is not dtype{index} or a.shape != {shape} or (strides != {strides}",
            f"            and not same_strides(a.shape, strides, {strides})):",
            f"        refuse(piece, name{index}, a, dtype{index}, {shape}, {strides})",
        ]
    return define("\n".join([*lines, "    return"]), "check", facts, f"<inputs of {piece}>")


def bindings(metas: Sequence[object]) -> dict[str, tuple[int, str]]:
    """Symbol -> (input that gives its value, how): a SymInt input, or a tensor dimension that is the bare symbol."""
    found: dict[str, tuple[int, str]] = {}
    for index, meta in enumerate(metas):
        sizes: list[tuple[str, Size]] = [("", meta)] if isinstance(meta, SymInt) else []
        if isinstance(meta, Tensor):
            sizes = [(f".shape[{axis}]", size) for axis, size in enumerate(meta.shape)]
        for how, size in sizes:
            if isinstance(size, SymInt) and {text := as_python(size)} == symbols_of(size):
                found.setdefault(text, (index, how))
    return found


def _tuple(sizes: Sequence[Size], known: dict[str, tuple[int, str]], got: str) -> str:
    """Source of the expected tuple; a size over symbols that no input gives alone is taken as found."""
    parts = [as_python(size) if symbols_of(size) <= known.keys() else f"{got}[{i}]" for i, size in enumerate(sizes)]
    return f"({''.join(f'{part}, ' for part in parts)})"


def same_strides(shape: Sequence[int], found: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether two strides of one shape address the same elements."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, found, expected, strict=True))


def _miscounted(piece: str, args: Sequence[object], names: tuple[str, ...]) -> None:
    raise PieceInputMismatch(piece, found=f"{len(args)} inputs", expected=f"{len(names)}: {', '.join(names)}")


def _refuse(
    piece: str, name: str, found: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    raise PieceInputMismatch(
        f"{piece}, input {name}",
        found=f"{found.dtype} of shape {tuple(found.shape)} and strides {found.stride()}",
        expected=f"{dtype} of shape {shape} and strides {strides}",
    )
