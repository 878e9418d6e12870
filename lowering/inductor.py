"""compile_piece: one piece of the program through Inductor, with every rounding point of the model kept.

Inductor keeps values in fp32 registers and drops `.to(bf16).float()` between fused nodes. That changes the model
(leaving the attention probabilities unrounded costs 3 % a layer), so pieces bypass Inductor's joint-graph passes and
pattern matcher and compile under settings that make it round where eager rounds. A piece is a functional ATen graph
with fake-tensor meta; sizes may be symbolic or unbacked. A cache write (index_put and copy_ back, or index_put_)
stays in place: `reorder_for_locality` would move a read behind the write and force a copy of the whole cache. Regions
are inlined first, so that Inductor fuses across them. Sizes have tiers (tiers.py), each compiled over sizes that torch
may ask about (_compat_sizes.py): of an unbacked size it knows nothing, and writes each view of a computed value out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from v41._compat import (
    OpOverload,
    inductor_compile,
    inductor_keeps_explicit_casts,
    inductor_settings,
    keep_output_strides,
    keep_rounding_of,
    outside_of_tracing,
    run_as_eager,
)
from v41._compat_cache import loaded_inductor_code, stored_inductor_code
from v41._compat_sizes import Numbers, with_sizes
from v41.lowering.piece_inputs import checker
from v41.lowering.rewrites import Rewrites, rewrite
from v41.lowering.tiers import Limits, Tier, chooser, distinct
from v41.regions import flatten

Artifact = Callable[..., tuple[Any, ...]]
Code = Callable[[list[Any]], Sequence[Any]]  # empties the list it is given

ROUNDED = (torch.bfloat16, torch.float16)
NONE = Rewrites()

# Settings of torch._inductor.config by dotted name; those a torch release lacks are left out.
SETTINGS: dict[str, object] = {
    "emulate_precision_casts": True,  # round where eager rounds, at the nodes that `mark` marks
    "pattern_matcher": False,  # its rewrites merge casts and swap mm + add for addmm, whose sum rounds once less
    "reorder_for_locality": False,  # a read moved behind a cache write makes the write a copy of the cache
    "eager_numerics.division_rounding": True,  # Triton's own division is off by a unit in the last place
    "aten_distributed_optimizations.enable_simple_overlap": False,  # hoists collectives over ops it cannot see
    "triton.cudagraphs": False,  # capture belongs to the runtime
    "cpp.simdlen": 1,  # scalar C++: equal bits, and a sixth of the compile time less
}

# Inductor's cache keeps guards on sizes that are inputs alone, and a piece may have its sizes from tensors: from there
# code would come without its conditions. What it generates is kept by our own cache, and kernels by Triton's.
ANEW: dict[str, object] = {"fx_graph_cache": False, "fx_graph_remote_cache": False}

# On a CPU bits count and speed does not: there programs are checked. Inductor's C++ has other routines than eager's for
# functions (eager itself has two, one for the last elements of a loop), and sums in another order: last bits differ,
# and single FP8, FP4 and top-k picks flip. So every float operator there runs eager's kernel, save these, which give
# the same bits whoever computes them. Not among them, though tempting: sqrt (eager's is a unit off at times; rsqrt is
# not), pow even of 2, maximum, clamp and amax (the sign of a zero), add with alpha (eager fuses it in whole vectors).
aten, prims = torch.ops.aten, torch.ops.prims
EXACT_ON_CPU = frozenset({
    aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.abs, aten.reciprocal, aten.rsqrt, aten.relu, aten.sign,
    aten.ceil, aten.floor, aten.trunc, aten.round, aten.where, aten.clone, prims.convert_element_type,
})  # fmt: skip


def compile_piece(
    gm: GraphModule, name: str = "piece", *, tiers: Sequence[Limits] = (), beyond: Artifact | None = None
) -> InductorPiece:
    """A callable over the placeholders of `gm`, in order, that returns the outputs as a tuple. `gm` is left as it was.

    Works inside a backend's compile and alone. `name` stands in the error for inputs the piece was not compiled for.
    tiers: ranges of sizes that get code of their own, narrowest first; `beyond` runs what none of them holds. Without
    tiers, and where a call does not tell all sizes, there is one code for all sizes.
    """
    assert beyond is not None or not tiers
    piece = flatten(gm)
    drop_whole_slices(piece)
    rewrites = rewrite(piece)
    placeholders = [node for node in piece.graph.nodes if node.op == "placeholder"]
    metas = [node.meta["val"] for node in placeholders]
    keep_output_strides(piece.graph)
    check = checker(name, [node.name for node in placeholders], metas)
    settings, found, codes = inductor_settings(SETTINGS), list[Tier](), list[Code]()
    numbers = Numbers(piece)
    for limits, large in with_large(distinct(tiers, metas)):
        if large and found and not found[-1].conditions:
            continue
        with outside_of_tracing():  # of AOTAutograd, whose fake tensors are of other sizes
            sized = with_sizes(piece, limits, large=large, numbers=numbers)
            code = inductor_compile(sized.gm, sized.metas, {**settings, **ANEW}, mark, f"{limits}, large: {large}")
        if not sized.is_pinned():
            codes.append(code)
            found.append(Tier(limits, tuple(sized.conditions())))
    if not codes:
        codes, found = [inductor_compile(piece, metas, settings, mark)], [Tier()]
    return InductorPiece(check, chooser(found, metas), codes, beyond, rewrites, found[-1].conditions)


def with_large(ranges: Sequence[Limits]) -> list[tuple[Limits, bool]]:
    """The ranges, then the widest once more for large sizes in it: it may have taken for granted that they are none."""
    return [*((limits, False) for limits in ranges), *((limits, True) for limits in ranges[-1:])]


class InductorPiece:
    """Inductor's codes, one a tier, behind the check of inputs. A stored one runs under the settings of its making.

    rewrites: what was put another way before Inductor saw it. granted: what the last code takes for granted of sizes,
    as Python; a call that breaks it runs `beyond`.
    """

    def __init__(
        self,
        check: Callable[..., None],
        choose: Callable[[Sequence[object]], int],
        codes: Sequence[Code],
        beyond: Artifact | None,
        rewrites: Rewrites = NONE,
        granted: tuple[str, ...] = (),
    ) -> None:
        self.check, self.choose, self.codes, self.beyond = check, choose, codes, beyond
        self.rewrites, self.granted = rewrites, granted

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        self.check(args)
        place = self.choose(args)
        if place < len(self.codes):
            return tuple(self.codes[place](list(args)))
        assert self.beyond is not None
        return self.beyond(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        codes = [stored_inductor_code(code) for code in self.codes]
        return load_piece, (self.check, self.choose, codes, self.beyond, self.rewrites, self.granted)


def load_piece(
    check: Callable[..., None],
    choose: Callable[[Sequence[object]], int],
    stored: Sequence[bytes],
    beyond: Artifact | None,
    rewrites: Rewrites,
    granted: tuple[str, ...],
) -> InductorPiece:
    """The piece that was stored."""
    codes = [loaded_inductor_code(code, inductor_settings(SETTINGS)) for code in stored]
    return InductorPiece(check, choose, codes, beyond, rewrites, granted)


def drop_whole_slices(gm: GraphModule) -> None:
    """`x[:, a:b]` has a slice for its rows that takes all; some releases cannot lower it over an unbacked size."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        if _takes_all(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def _takes_all(node: Node) -> bool:
    given: list[Any] = [*node.args[2:], *(None, None, 1)[max(len(node.args) - 2, 0) :]]
    start, end, step = given
    return not node.kwargs and start in (0, None) and end in (None, sys.maxsize) and step == 1


def mark(graph: Graph) -> None:
    """Marks what reads or returns a 16-bit float to be rounded to its dtype, and on a CPU what eager is to run."""

    def narrow(node: Node) -> bool:
        return isinstance(value := node.meta.get("val"), Tensor) and value.dtype in ROUNDED

    for node in graph.nodes:
        if node.op == "call_function" and (narrow(node) or any(map(narrow, node.all_input_nodes))):
            keep_rounding_of(node)
        if may_round_otherwise(node) or sorts_on_gpu(node):
            run_as_eager(node)


def may_round_otherwise(node: Node) -> bool:
    """Whether `node` computes floats on a CPU in a way of which Inductor's C++ has its own version."""
    op = node.target
    if not isinstance(op, OpOverload) or not {torch.Tag.pointwise, torch.Tag.reduction} & set(op.tags):
        return False
    if op.overloadpacket in EXACT_ON_CPU and not {"alpha", "rounding_mode"} & node.kwargs.keys():
        return False
    values = node.meta.get("val")
    values = values if isinstance(values, (tuple, list)) else [values]
    return any(isinstance(value, Tensor) and value.is_cpu and value.dtype.is_floating_point for value in values)


def sorts_on_gpu(node: Node) -> bool:
    """Inductor sorts a row in one warp: 140 µs for one of 512 on an H200, where eager's radix sort takes 28."""
    value = node.meta.get("val")
    return node.target in (aten.sort.default, aten.sort.stable) and value is not None and value[0].is_cuda


@cache
def supported(device: torch.device) -> str | None:
    """None if pieces on `device` keep their rounding points under this torch, else the sentence that says why not.

    Decided by running: a short chain of explicit and implied bf16 roundings is compiled once a process and its bits
    are compared with eager's, so a torch release that loses or gains the ability is noticed by itself. Where Inductor
    has no way to keep an explicit cast in C++ (a test holds that against the run) no compile is needed.
    """
    where = f"Inductor of torch {torch.__version__} on {device.type}"
    drops = f"{where} drops rounding to bf16 between fused operations"
    if device.type == "cpu" and not inductor_keeps_explicit_casts():
        return drops
    value = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    probe = cast_chain(device)
    try:
        (found,) = compile_piece(probe, "the rounding probe")(value)
    except Exception as error:  # whatever is missing (a C++ compiler, Triton): pieces run as eager and say so
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{where} compiles nothing here: {first_line}"
    (expected,) = probe(value)
    return None if torch.equal(found, expected) else drops


def cast_chain(device: torch.device) -> GraphModule:
    """bf16 x -> ((x * 1.37 to bf16) * 0.77 to bf16 + x) * x in fp32: a lost cast or an unrounded bf16 sum shows."""
    graph = Graph()
    cast, mul = torch.ops.prims.convert_element_type.default, torch.ops.aten.mul.Tensor
    x = graph.placeholder("x")
    wide = graph.call_function(cast, (x, torch.float32))
    once = graph.call_function(cast, (graph.call_function(mul, (wide, 1.37)), torch.bfloat16))
    again = graph.call_function(mul, (graph.call_function(cast, (once, torch.float32)), 0.77))
    total = graph.call_function(torch.ops.aten.add.Tensor, (graph.call_function(cast, (again, torch.bfloat16)), x))
    graph.output((graph.call_function(mul, (graph.call_function(cast, (total, torch.float32)), wide)),))
    gm = GraphModule(torch.nn.Module(), graph)
    FakeTensorProp(gm).propagate(torch.empty(4, 64, dtype=torch.bfloat16, device=device))
    return gm
