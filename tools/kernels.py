"""kernels: the generated kernels of a plan, as they would be on a GPU: text, the pieces that run each, its launches.

    mhc_boundary_3fa2b1c7   pieces piece_4, piece_8, ...   rows 1: grid of 1 x 40, 4 warps   rows 64: ...

Made from the pieces' bodies alone, by the backend's own decision (backend.kernel_of), so no GPU need be there: outside
of one a program runs its ATen nodes, and this is what it would launch. `compiled` then compiles them for a GPU by name,
in another process (lowering/cross_compile.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from v41._compat import without_storage
from v41.backend import kernel_of, kinds_cut_out
from v41.lowering.cross_compile import Facts, Request, compile_for
from v41.lowering.generated import GeneratedPiece
from v41.lowering.rowwise.launch import Kernel
from v41.plan import Piece, Plan
from v41.regions import region_of, regions

ROWS = (1, 64, 4096)  # for which launches are told
POINTER = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8",
    torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True)
class LaunchFacts:
    """One launch of a step of `rows`: Triton's names of its arguments' types, constants and options."""

    rows: int
    grid: tuple[int, ...]
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class KernelFacts:
    """What the pieces `pieces` would run; `source` and `launches` are empty where `refusal` says why there is none."""

    name: str
    regions: tuple[str, ...]
    pieces: tuple[str, ...]
    source: str
    launches: tuple[LaunchFacts, ...]
    refusal: str | None = None


def kernels_of(plan: Plan, codegen: str) -> list[KernelFacts]:
    """One for each artifact that the backend generates a kernel for, or would if it could; in order of its first piece.

    codegen: the one that `plan` was made for. None but "triton" generates.
    """
    pieces = {piece.name: piece for piece in plan.pieces}
    groups = plan.keys.values() if codegen == "triton" else ()
    found = (_kernel(pieces[names[0]], names) for names in groups)
    return [each for each in found if each is not None]


def _kernel(piece: Piece, names: Sequence[str]) -> KernelFacts | None:
    made = kernel_of(piece.body, piece.name)
    if made is None:
        return None
    told = tuple(region_of(call).name for call in regions(piece.body))
    if not isinstance(made, GeneratedPiece):
        kinds = "_".join(kinds_cut_out(piece.body))
        return KernelFacts(kinds, told, tuple(names), "", (), f"{made.node} ({made.op}) {made.reason}")
    return KernelFacts(made.kernel.name, told, tuple(names), made.kernel.source, tuple(launches_of(made.kernel)))


def taken(kernels: Iterable[KernelFacts]) -> frozenset[str]:
    """The pieces that run a generated kernel."""
    return frozenset(piece for kernel in kernels if kernel.refusal is None for piece in kernel.pieces)


def launches_of(kernel: Kernel, rows: Sequence[int] = ROWS) -> Iterator[LaunchFacts]:
    """What steps of `rows` launch, as on a GPU with all the shared memory it asks for. Nothing is told of a kernel of
    several functions, which launches them by more sizes than rows: an indexer's."""
    if not hasattr(kernel.module, kernel.name):
        return
    names = kernel.function.arg_names
    for count in rows:
        with without_storage():
            given = [
                None if what is None else torch.empty([count if n is None else n for n in what.shape], dtype=what.dtype)
                for what in kernel.inputs
            ]
            call = kernel.prepare(given)
        types = ["i32" if isinstance(arg, int) else POINTER[arg.dtype] for arg in call.arguments]
        signature = dict(zip(names, types, strict=False))
        for grid, constants, options in call.steps():
            yield LaunchFacts(count, tuple(grid), signature, dict(constants), dict(options))


@dataclass(frozen=True)
class Compiled:
    """One kernel's launch, compiled."""

    kernel: str
    rows: int
    constants: dict[str, Any]
    facts: Facts


def compiled(
    kernels: Sequence[KernelFacts], arch: str, rows: Sequence[int], told: Callable[[str], None] = lambda name: None
) -> Iterator[Compiled]:
    """Every different launch of `kernels` at `rows`, compiled for `arch`. KernelDoesNotCompile where one is not.

    Launches that differ in their grid alone are one. told: hears the name of each kernel when its turn comes.
    """
    with tempfile.TemporaryDirectory() as folder:
        for kernel in kernels:
            told(kernel.name)
            path = Path(folder, f"{kernel.name}.py")
            path.write_text(kernel.source)
            asked: dict[str, tuple[int, Request]] = {}
            for launch in kernel.launches:
                if launch.rows in rows:
                    request = Request(str(path), kernel.name, launch.signature, launch.constants, arch, (),
                                      launch.options)  # fmt: skip
                    asked.setdefault(repr(request), (launch.rows, request))
            facts = compile_for([request for _, request in asked.values()])
            for (count, request), each in zip(asked.values(), facts, strict=True):
                yield Compiled(kernel.name, count, dict(request.constants), each)
