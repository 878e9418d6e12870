"""kernels: the generated kernels of a plan, as they would be on a GPU: text, the pieces that run each, its launches.

    mhc_boundary_3fa2b1c7   pieces piece_4, piece_8, ...   rows 1: grid of 1 x 40, 4 warps   rows 64: ...

Made from the pieces' bodies alone, by the backend's own decision (backend.kernel_of), so no GPU need be there: outside
of one a program runs its ATen nodes, and this is what it would launch, for each of ARCHS, in steps of ROWS rows.
`compiled` then compiles them for a GPU by name, in another process (lowering/cross_compile.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41._compat import without_storage
from v41.backend import kernel_of, kinds_cut_out
from v41.errors import KernelDoesNotCompile
from v41.gpu_facts import KNOWN
from v41.lowering.ahead import like, steps_of
from v41.lowering.cross_compile import Facts, Request, compile_for
from v41.lowering.generated import GeneratedPiece
from v41.lowering.gpu import as_on
from v41.lowering.rowwise.launch import Kernel
from v41.lowering.templates.all_reduce import SummingKernel
from v41.model_def.config import V41Config
from v41.plan import Piece, Plan
from v41.regions import region_of, regions
from v41.tools.pretended_ranks import group_of, shared_memory
from v41.tools.steps import step_of_rows

ROWS = (1, 64, 4096)  # for which launches are told: decode steps, and a prefill
ARCHS = tuple(KNOWN)
POINTER = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8",
    torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
Sizes = Mapping[int, Mapping[str, int]]  # rows of a step -> its sizes, by symbols of the plan


@dataclass(frozen=True)
class LaunchFacts:
    """One launch of a step of `rows` on `arch`: which function of the text, Triton's names of its arguments' types,
    constants, options, and which of its numbers Triton knows to be multiples of 16."""

    rows: int
    arch: str
    function: str
    grid: tuple[int, ...]
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    divisible: tuple[str, ...]


@dataclass(frozen=True)
class KernelFacts:
    """What the pieces `pieces` would run; `source` and `launches` are empty where `refusal` says why there is none."""

    name: str
    regions: tuple[str, ...]
    pieces: tuple[str, ...]
    source: str
    launches: tuple[LaunchFacts, ...]
    refusal: str | None = None


def kernels_of(plan: Plan, codegen: str, config: V41Config | None = None) -> list[KernelFacts]:
    """One for each artifact that the backend generates a kernel for, or would if it could; in order of its first piece.

    codegen: the one that `plan` was made for. None but "triton" generates. config: of the model, if it is a V4.1 model;
    steps have its sizes, and those that decode read as many tokens as steps.CONTEXT. KernelsNotWritten.
    """
    if codegen != "triton":
        return []
    pieces = {piece.name: piece for piece in plan.pieces}
    sizes = {rows: step_of_rows(plan, config, rows).symbols for rows in ROWS}
    with group_of(plan):
        found = [_kernel(pieces[names[0]], names, sizes) for names in plan.keys.values()]
    return [each for each in found if each is not None]


def _kernel(piece: Piece, names: Sequence[str], sizes: Sizes) -> KernelFacts | None:
    made = kernel_of(piece.body, piece.name)
    if made is None:
        return None
    told = tuple(region_of(call).name for call in regions(piece.body))
    if not isinstance(made, GeneratedPiece):
        kinds = "_".join(kinds_cut_out(piece.body))
        return KernelFacts(kinds, told, tuple(names), "", (), f"{made.node} ({made.op}) {made.reason}")
    kernel, values = made.kernel, [node.meta["val"] for node in piece.body.graph.find_nodes(op="placeholder")]
    launches = tuple(launches_of(kernel, values, sizes))
    return KernelFacts(kernel.name, told, tuple(names), kernel.source, launches)


def taken(kernels: Iterable[KernelFacts]) -> frozenset[str]:
    """The pieces that run a generated kernel."""
    return frozenset(piece for kernel in kernels if kernel.refusal is None for piece in kernel.pieces)


def launches_of(kernel: Kernel, values: Sequence[object], sizes: Sizes) -> Iterator[LaunchFacts]:
    """What steps of `sizes` launch on each of ARCHS. values: what tracing says of the inputs of its piece. A sum over
    ranks is told as the first of them launches it."""
    for arch in ARCHS:
        for rows, symbols in sizes.items():
            with as_on(arch), without_storage():
                if isinstance(kernel, SummingKernel):
                    kernel.bind(shared_memory(kernel.ranks, arch))
                steps = steps_of(kernel, [like(value, symbols) for value in values])
            for name, grid, arguments, constants, options in steps:
                function = getattr(kernel.module, name)
                given = dict(zip(function.arg_names, arguments, strict=False))
                types = {arg: POINTER[v.dtype] if isinstance(v, Tensor) else whole(v) for arg, v in given.items()}
                any_value = getattr(function, "do_not_specialize", None) or ()
                even = tuple(arg for arg, v in given.items()
                             if isinstance(v, int) and v % 16 == 0 and arg not in any_value)  # fmt: skip
                yield LaunchFacts(rows, arch, name, tuple(grid), types, dict(constants), dict(options), even)


def whole(number: int) -> str:
    """Triton's type of a number."""
    return "i32" if -(1 << 31) <= number < 1 << 31 else "i64"


@dataclass(frozen=True)
class Compiled:
    """One kernel's launch, compiled; or a kernel that is not, of which `error` says at which line of its text."""

    kernel: str
    function: str
    rows: int
    constants: dict[str, Any]
    facts: Facts | None
    error: str | None = None


def compiled(
    kernels: Sequence[KernelFacts], arch: str, rows: Sequence[int], told: Callable[[str], None] = lambda name: None
) -> Iterator[Compiled]:
    """Every different launch of `kernels` at `rows`, compiled for `arch`; one that does not compile ends its kernel.

    Launches that differ in their grid alone are one. told: hears the name of each kernel when its turn comes.
    """
    with tempfile.TemporaryDirectory() as folder:
        for kernel in kernels:
            told(kernel.name)
            path = Path(folder, f"{kernel.name}.py")
            path.write_text(kernel.source)
            asked: dict[str, tuple[int, Request]] = {}
            for launch in kernel.launches:
                if launch.rows in rows and launch.arch == arch:
                    request = Request(str(path), launch.function, launch.signature, launch.constants, arch,
                                      launch.divisible, launch.options)  # fmt: skip
                    asked.setdefault(repr(request), (launch.rows, request))
            try:
                facts = compile_for([request for _, request in asked.values()])
            except KernelDoesNotCompile as error:
                yield Compiled(kernel.name, str(error.facts["kernel"]), min(rows), {}, None, _brief(error))
                continue
            for (count, request), each in zip(asked.values(), facts, strict=True):
                yield Compiled(kernel.name, request.kernel, count, dict(request.constants), each)


def _brief(error: KernelDoesNotCompile) -> str:
    """What Triton says, and the line of the text that it says it of."""
    first, *more = [line.strip() for line in str(error.facts["error"]).splitlines() if line.strip(" ^\t")]
    return " ".join([first, *more[-1:]])
