"""with_sizes: a program over unbacked sizes becomes one over ordinary dynamic sizes, with a range and a likely value.

    before   x [u0, 16], u0 any number                  after   x [s0, 16], 2 <= s0 <= 256, 64 where one must choose

Of an unbacked size torch knows nothing: Inductor writes every view of a computed value to memory first, indexes with 64
bits and picks schedules for 8192 rows. Of an ordinary one it asks what it needs to know and notes the answer as a
guard. No compile of the user's hangs on these: they come back as conditions, and whoever calls the code checks them.

That sizes are 2 or more is taken for granted while compiling, as torch does for unbacked ones: it settles what is
broadcast and in which order dimensions lie, and code for the general case is right for one row as well. Not where the
program cuts or compares sizes: the first two rows of one are one. So it is propagated over ones too, and where a size
comes out otherwise, a condition keeps ones away.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from v41._compat import symbols_of

LIKELY = 64, 1024  # of a size without a limit; where large ones are compiled for
PARTS = 16, 4  # a likely size is this part of its limit; likewise


@dataclass
class Sized:
    """gm: the program over its own sizes, meta included. metas: of its inputs, in order."""

    gm: GraphModule
    metas: list[Any]
    shapes: Any  # torch's ShapeEnv
    names: dict[Any, Any]  # its symbols -> those of the program it was made from
    large_enough: list[str]  # conditions on those: sizes of 1 for which the program has other sizes than its code

    def is_pinned(self) -> bool:
        """Whether compiling took a size for its likely value, so that the code is for that alone."""
        return any(symbol in self.shapes.replacements for symbol in self.names)

    def conditions(self) -> list[str]:
        """What compiling took for granted beyond the ranges, as Python over the symbols of the original program."""
        from torch.utils._sympy.printers import PythonPrinter

        exprs = dict.fromkeys(guard.expr for guard in self.shapes.guards)
        return self.large_enough + [PythonPrinter().doprint(expr.xreplace(self.names)) for expr in exprs]


class Numbers:
    """`gm` over numbers for its symbols, each set of them propagated once for all ranges that it gets code for."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.likely: dict[Any, int] = {}  # symbol -> its likely value in the first range that leaves it free
        self.known: dict[tuple[int, ...], list[Any] | None] = {}

    def values(self, numbers: Mapping[Any, int]) -> list[Any] | None:
        """The meta of each node, in order; None where an operator does not take these sizes."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        key = tuple(numbers.values())  # of the same symbols, in the same order
        if key not in self.known:
            mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            try:
                with _unlogged("torch._subclasses.fake_tensor"):
                    copy, _ = _propagated(self.gm, numbers, mode)
                self.known[key] = [node.meta.get("val") for node in copy.graph.nodes]
            except Exception:  # whatever an operator says of sizes that it does not take
                self.known[key] = None
        return self.known[key]


def with_sizes(
    gm: GraphModule, limits: Mapping[str, int], *, large: bool = False, numbers: Numbers | None = None
) -> Sized:
    """`gm` with sizes of their own: each symbol in `limits` is at most that and about a sixteenth of it; 1 for limit 1.

    gm: functional ATen on fake tensors; a symbol must be a size of an input or an input. It stays as it is. `large`: a
    fourth of the limit is likely, so what then has too many elements for 32 bits is not indexed with so few. numbers:
    what the calls for other ranges of `gm` found, narrowest first.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    given = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    sizes = {symbol: _new(shapes, symbol, limits.get(str(symbol)), large) for symbol in _symbols(given)}
    names = {size.node.expr: symbol for symbol, size in sizes.items() if isinstance(size, SymInt)}
    copy, metas = _propagated(gm, sizes, mode)
    return Sized(copy, metas, shapes, names, _large_enough(copy, sizes, limits, numbers or Numbers(gm)))


def _propagated(gm: GraphModule, sizes: Mapping[Any, int | SymInt], mode: Any) -> tuple[GraphModule, list[Any]]:
    """A copy of `gm` with `sizes` for its symbols, and the meta of its inputs."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def resized(size: int | SymInt) -> int | SymInt:
        if isinstance(size, int):
            return size
        return _evaluated(size.node.expr, sizes)

    def fresh(value: Any) -> Any:
        if isinstance(value, SymInt):
            return resized(value)
        if not isinstance(value, Tensor):
            return value
        shape, strides = ([resized(size) for size in part] for part in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)

    with mode:
        metas = [fresh(node.meta.get("val")) for node in gm.graph.find_nodes(op="placeholder")]
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:  # some hold a size itself where others hold the node that has it
        sized = map_aggregate((node.args, node.kwargs), lambda arg: resized(arg) if isinstance(arg, SymInt) else arg)
        node.args, node.kwargs = sized
    copy = GraphModule(gm, graph)

    class Propagate(FakeTensorProp):
        def run_node(self, n: Node) -> Any:
            found = super().run_node(n)
            if isinstance(found, int | float):  # a symbol before; torch leaves what was noted of it
                n.meta["val"] = found
            return found

    with enable_python_dispatcher():  # else operators without a fake of their own (constant_pad_nd) make sizes numbers
        Propagate(copy, mode).propagate_dont_convert_inputs(*metas)
    for node, value in zip(graph.find_nodes(op="placeholder"), metas, strict=True):
        node.meta["val"] = value
    return copy, metas


def _large_enough(
    sized: GraphModule, sizes: Mapping[Any, int | SymInt], limits: Mapping[str, int], numbers: Numbers
) -> list[str]:
    """Conditions that keep ones from `sized`: on a size that alone makes a difference, or on all, where only all do.

    A one that the program refuses beside other sizes is none to keep away: sizes are related, as blocks and top-k are.
    """
    free = {symbol: size for symbol, size in sizes.items() if isinstance(size, SymInt)}
    likely = {symbol: 1 for symbol in sizes}
    for symbol, size in free.items():
        shared = numbers.likely.setdefault(symbol, size.node.hint)
        likely[symbol] = shared if shared <= limits.get(str(symbol), shared) else size.node.hint

    def differs(ones: Sequence[Any]) -> bool:
        taken = {**likely, **dict.fromkeys(ones, 1)}
        found = numbers.values(taken)
        if found is None:
            return len(free) == 1
        values = {free[symbol].node.expr: number for symbol, number in taken.items() if symbol in free}
        return any(
            not _same_sizes(node.meta.get("val"), other, values)
            for node, other in zip(sized.graph.nodes, found, strict=True)
            if node.op != "output"
        )

    alone = [symbol for symbol in free if differs([symbol])]
    if not alone and len(free) > 1 and differs([*free]):
        alone = [*free]
    return [f"{symbol} > 1" for symbol in alone]


@contextlib.contextmanager
def _unlogged(name: str) -> Iterator[None]:
    """Under it, the logger `name` says nothing: torch writes a trace of each error that it raises."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _same_sizes(value: Any, numbers: Any, values: Mapping[Any, int]) -> bool:
    """Whether `value` has the sizes that `numbers` has, with `values` for its symbols. Strides of ones mean nothing."""
    if isinstance(value, Tensor):
        value, numbers = tuple(value.shape), tuple(numbers.shape)
    if isinstance(value, (tuple, list)):
        pairs = zip(value, numbers, strict=False)
        return len(value) == len(numbers) and all(_same_sizes(*pair, values) for pair in pairs)
    if not isinstance(value, SymInt | SymFloat | SymBool):
        return not isinstance(value, int | float) or bool(value == numbers)
    if not isinstance(numbers, int | float) or not value.node.expr.free_symbols <= values.keys():
        return True  # of data
    return bool(value.node.expr.subs(values) == numbers)


def _symbols(values: Sequence[object]) -> list[Any]:
    """The symbols of inputs, by name."""
    sizes = [
        size
        for value in values
        for size in ((*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,))
        if isinstance(size, SymInt) and symbols_of(size)
    ]
    return sorted({symbol for size in sizes for symbol in size.node.expr.free_symbols}, key=str)


def _new(shapes: Any, symbol: Any, most: int | None, large: bool) -> int | SymInt:
    """A size of 2 to `most`; 1 where there is no other."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    if most is not None and most < 2:
        return 1
    likely, source = LIKELY[large] if most is None else max(2, most // PARTS[large]), ConstantSource(f"v41_{symbol}")
    made = shapes.create_symbol(likely, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True)
    shapes.var_to_range[made] = ValueRanges(2, int_oo if most is None else most)
    size: SymInt = shapes.create_symintnode(made, hint=likely, source=source)
    return size


def _evaluated(expr: Any, sizes: Mapping[Any, int | SymInt]) -> int | SymInt:
    """The value of a sympy expression over symbols, with a size for each."""
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    if isinstance(expr, sympy.Symbol):
        return sizes[expr]
    found: int | SymInt = sympy_interp(PythonReferenceAnalysis, dict(sizes), expr)
    return found
