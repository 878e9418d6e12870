"""check_pass: runs a pass on a program and holds it to everything a pass promises, whatever the pass is for.

Structure: what the compiler's own `verify` asks (order, meta, signature, effects, sharing), and lint. Meaning: the
same bits, aliasing and writes on random inputs of 0, 1, 2 and 5 rows, and in fp64. Manners: running it again changes
nothing; running it on a copy, or with other node names, gives the same program and the same decisions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Interpreter
from torch.utils._pytree import tree_map

from v41.passes.structure import structure_key
from v41.passes.verify import facts, verify
from v41.regions import invoke_subgraph
from v41.report import Decision

PassFunction = Callable[[GraphModule], list[Decision]]
ROWS = (0, 1, 2, 5)


def check_pass(pass_fn: PassFunction, gm: GraphModule, rows: Sequence[int] = ROWS) -> list[Decision]:
    """Applies `pass_fn` to `gm` and returns its decisions. AssertionError names the promise that it broke."""
    before, twin, renamed = copy_program(gm), copy_program(gm), copy_program(gm, prefix="renamed_")
    entered = facts(gm)
    decisions = apply(pass_fn, gm)
    verify(gm, entered, name="the pass")
    for count in rows:
        check_same_values(before, gm, count)
    check_same_values(before, gm, 2, exact=True)
    once = structure_key(gm)
    for copy, complaint in ((twin, "not deterministic"), (renamed, "node names matter")):
        again = apply(pass_fn, copy)
        assert list(map(nameless, again)) == list(map(nameless, decisions)), f"decisions: {complaint}"
        assert structure_key(copy) == once, f"program: {complaint}"
    apply(pass_fn, gm)
    assert structure_key(gm) == once, "a second run changes the program"
    return decisions


def apply(pass_fn: PassFunction, gm: GraphModule) -> list[Decision]:
    """What the driver does around a pass."""
    decisions = pass_fn(gm)
    for program in everything_in(gm):
        program.graph.lint()
        program.recompile()
    return decisions


def nameless(decision: Decision) -> Decision:
    """`decision` without the names of nodes."""
    return replace(decision, node="", culprit=None)


def everything_in(gm: GraphModule) -> Iterator[GraphModule]:
    """`gm` and all its subgraphs, those of regions as well."""
    yield gm
    for body in dict.fromkeys(child for child in gm.children() if isinstance(child, GraphModule)):
        yield from everything_in(body)


def copy_program(gm: GraphModule, prefix: str = "", done: dict[GraphModule, GraphModule] | None = None) -> GraphModule:
    """A copy that no edit of `gm` reaches; subgraphs that were shared stay shared. `prefix` renames every node."""
    done = {} if done is None else done
    if gm not in done:
        graph, env = Graph(), {}
        for node in gm.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.op not in ("placeholder", "output") and prefix:
                env[node]._rename(prefix + node.name)
        attributes = {}
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                held = getattr(gm, str(node.target))
                copied = copy_program(held, prefix, done) if isinstance(held, GraphModule) else held
                attributes[str(node.target)] = copied
        done[gm] = GraphModule(attributes, graph)
        done[gm].meta = dict(gm.meta)
    return done[gm]


# ---- meaning ---------------------------------------------------------------------------------------------------------


def check_same_values(before: GraphModule, after: GraphModule, rows: int, *, exact: bool = False) -> None:
    """Both programs give the same bits, write the same inputs alike and share memory alike; `exact`: run in fp64."""
    seen = []
    for gm in (before, after):
        inputs = random_inputs(gm, rows, exact=exact)
        with torch.no_grad():
            outputs = InFloat64(gm).run(*inputs) if exact else gm(*inputs)
        tensors = [value for value in [*inputs, *outputs] if isinstance(value, Tensor)]
        seen.append((tensors, [spec(tensor) for tensor in tensors], sharing(tensors) if rows else None))
    (mine, specs, shared), (theirs, specs_after, shared_after) = seen
    assert specs == specs_after, "strides or dtypes changed in a real run"
    assert shared == shared_after, "other outputs share memory than before"
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert same_bits(a, b), f"value {i} of inputs and outputs differs with {rows} rows{' in fp64' if exact else ''}"


def random_inputs(gm: GraphModule, rows: int, *, exact: bool = False, seed: int = 0) -> list[Any]:
    """Inputs for the placeholders of `gm` with every symbolic size `rows`. exact: floats as fp64."""
    generator = torch.Generator().manual_seed(seed)
    return [random_like(n.meta["val"], rows, generator, exact) for n in gm.graph.nodes if n.op == "placeholder"]


def random_like(value: Any, rows: int, generator: torch.Generator, exact: bool) -> Any:
    if not isinstance(value, Tensor):
        return size(value, rows) if isinstance(value, SymInt) else value
    shape, strides = [size(n, rows) for n in value.shape], [size(n, rows) for n in value.stride()]
    dtype = torch.float64 if exact and value.dtype.is_floating_point else value.dtype
    tensor = torch.empty_strided(shape, strides, dtype=dtype)
    if value.dtype.is_floating_point:
        return tensor.copy_(torch.randn(shape, generator=generator, dtype=torch.float64).to(value.dtype))
    return tensor.copy_(torch.randint(0, 2, shape, generator=generator))


def size(value: int | SymInt, rows: int) -> int:
    """A size with `rows` for every symbol in it."""
    if not isinstance(value, SymInt):
        return int(value)
    return int(value.node.expr.xreplace({symbol: sympy.Integer(rows) for symbol in value.node.expr.free_symbols}))


def spec(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}"


def sharing(tensors: list[Tensor]) -> list[int]:
    """For each tensor the first one with the same storage."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [storages.index(storage) for storage in storages]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, zeros with their sign; all NaNs count as one."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    plain = [tensor.masked_fill(tensor.isnan(), 0).contiguous().view(bits) for tensor in (a, b)]
    return torch.equal(*plain)


class InFloat64(Interpreter):
    """Runs a program with every floating dtype replaced by fp64: no rounding point is left."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is invoke_subgraph:
            return InFloat64(args[0]).run(*args[2:])
        if target is operator.getitem:
            return super().call_function(target, args, kwargs)
        args, kwargs = tree_map(_double, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _double(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
