"""same_values: a program before and after a pass, run on the same random inputs: the same bits, in and out of fp64.

    before, after   copies that nothing edits meanwhile
    difference(before, after, rows)       how they differ with `rows` for every symbolic size; None where they do not
    check_values(before, after, name=)    InvariantBroken naming the first node that differs; or why none could tell

Integers are drawn below the size of what they index, where the graph says so, else from 0 and 1, which index nearly
everything; divisors are not 0. Once all integers are -1, as picks that there are not. Inputs on which the program
before a pass does not run itself tell nothing of the pass; nor does fp64 where the program reads the bits of floats
(quantised records), and the model's own types stand alone. Collectives give what they would if all ranks had what this
one has: nothing is sent, for on such inputs one rank may fail where another waits for it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, ops
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map

from v41._compat import outside_fake_mode, size_with
from v41._compat_groups import ranks_of
from v41.errors import InvariantBroken
from v41.passes.analysis.collectives import spoken
from v41.passes.matching import fake, source_of_view
from v41.regions import invoke_subgraph
from v41.report import source_of

aten = ops.aten

RULE = "computes the same values"
# Rows, and what all integers are, None for drawn ones. The first two that run count, and the last.
ATTEMPTS: tuple[tuple[int, int | None], ...] = ((2, None), (3, None), (2, 1), (3, 1), (2, 0), (1, 0), (2, -1))
LIMIT = 2**32  # bytes of inputs above which nothing is run
INDEXED = {  # operator -> positions of what is indexed and of the index, and the axis, None where argument 1 says it
    aten.embedding.default: (0, 1, 0),
    aten.index_select.default: (0, 2, None),
    aten.gather.default: (0, 2, None),
}
DIVISIONS = (aten.remainder.Tensor, aten.fmod.Tensor, aten.div.Tensor, aten.div.Tensor_mode, aten.floor_divide.default)


def check_values(before: GraphModule, after: GraphModule, *, name: str) -> str | None:
    """Raises InvariantBroken where pass `name` changed a value. Text: why the values could not be compared."""
    inputs = [n.meta["val"] for n in before.graph.nodes if n.op == "placeholder" and fake(n) is not None]
    total = sum(bytes_of(value) for value in inputs)
    if total > LIMIT:
        return f"values not compared: the inputs take {total / 2**30:.3g} GiB"
    ran, error = 0, ""
    for attempt in ATTEMPTS:
        if ran >= 2 and attempt is not ATTEMPTS[-1]:
            continue
        rows, integer = attempt
        try:
            run(before, random_inputs(before, rows, integer=integer))
        except Exception as raised:  # whatever it is, it is not the pass's doing
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
            continue
        for exact in (False, True):
            told = difference(before, after, rows, exact=exact, integer=integer)
            if told is not None:
                node = first_difference(before, after, rows, exact=exact, integer=integer) or after.graph.output_node()
                raise InvariantBroken(source_of(node), run=name, rule=RULE, node=node.name, detail=told)
        ran += 1
    return None if ran else f"values not compared: the program does not run on random inputs: {error}"


def difference(
    before: GraphModule, after: GraphModule, rows: int, *, exact: bool = False, integer: int | None = None
) -> str | None:
    """How the two programs differ in values, specs, writes of inputs or shared memory. exact: run in fp64."""
    seen = []
    for gm in (before, after):  # what an input may hold is told by the program before: the other hides it in bodies
        inputs = random_inputs(before, rows, exact=exact, integer=integer)
        try:
            outputs = run(gm, inputs, exact=exact)
        except Exception as error:
            if exact and gm is before:
                return None  # it reads bits of narrow types: fp64 has none of them
            return f"it does not run: {type(error).__name__}: {error}".splitlines()[0]
        tensors = [value for value in [*inputs, *tree_leaves(outputs)] if isinstance(value, Tensor)]
        seen.append((tensors, [spec(tensor) for tensor in tensors], sharing(tensors) if rows else None))
    (mine, specs, shared), (theirs, specs_after, shared_after) = seen
    if specs != specs_after:
        return "strides or dtypes changed in a real run"
    if shared != shared_after:
        return "other outputs share memory than before"
    where = f"with {rows} rows{' in fp64' if exact else ''}"
    different = (i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if not same_bits(a, b))
    return next((f"value {i} of inputs and outputs differs {where}" for i in different), None)


def first_difference(
    before: GraphModule, after: GraphModule, rows: int, *, exact: bool, integer: int | None
) -> Node | None:
    """The first node of `after` whose value is not that of its namesake before; None where none is at fault."""
    kept: list[dict[str, Tensor]] = []
    for gm in (before, after):
        runner = Runner(gm, exact, kept={})
        with torch.no_grad(), outside_fake_mode(), contextlib.suppress(Exception):  # as far as it runs
            runner.run(*random_inputs(before, rows, exact=exact, integer=integer))
        kept.append(runner.kept or {})
    for node in after.graph.nodes:
        if node.name in kept[0] and node.name in kept[1] and not same_bits(kept[0][node.name], kept[1][node.name]):
            return node
    return None


# ---- running ---------------------------------------------------------------------------------------------------------


def run(gm: GraphModule, inputs: Sequence[Any], *, exact: bool = False) -> Any:
    """The outputs of `gm`, whose code is up to date. Random numbers are the same in every run."""
    with torch.no_grad(), outside_fake_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Runner(gm, exact).run(*inputs) if exact or spoken(gm)[1] else gm(*inputs)


class Runner(Interpreter):
    """Runs a program, bodies of regions included; `exact`: with fp64 for every floating dtype, so nothing is rounded.

    `kept`, where given, gets a copy of the tensor of every node.
    """

    def __init__(self, gm: GraphModule, exact: bool, kept: dict[str, Tensor] | None = None) -> None:
        super().__init__(gm)
        self.exact, self.kept = exact, kept
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if self.kept is not None and isinstance(value, Tensor):
            self.kept[n.name] = value.clone()
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is invoke_subgraph:
            return Runner(args[0], self.exact).run(*args[2:])
        if self.exact and target is aten.view.dtype and (args[0].is_floating_point() or args[1].is_floating_point):
            raise RuntimeError("fp64 has not the bits of narrower types")  # by luck sizes may fit, and mean nothing
        if self.exact and target is not operator.getitem:
            args, kwargs = tree_map(_double, (args, kwargs))
        if target in ALONE:
            names = [argument.name for argument in target._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            ranks = ranks_of(given.get("group_name"))
            if ranks is not None or target is c10d.wait_tensor.default:
                return ALONE[target](given, ranks)
        return super().call_function(target, args, kwargs)


def _summed(x: Tensor, given: dict[str, Any], ranks: int) -> Tensor:
    """What `ranks` ranks that all have x make of it."""
    by = {"sum": lambda: x * ranks, "product": lambda: x**ranks}
    return by.get(given["reduce_op"].lower(), x.clone)().to(x.dtype)


c10d = ops._c10d_functional
ALONE: dict[Any, Callable[[dict[str, Any], Any], Tensor]] = {
    c10d.wait_tensor.default: lambda given, ranks: given["tensor"],
    c10d.all_reduce.default: lambda given, ranks: _summed(given["input"], given, ranks),
    c10d.all_gather_into_tensor.default: lambda given, ranks: torch.cat([given["input"]] * ranks),
    c10d.reduce_scatter_tensor.default: lambda given, ranks: _summed(given["input"].chunk(ranks)[0], given, ranks),
}


def _double(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


# ---- inputs ----------------------------------------------------------------------------------------------------------


def random_inputs(
    gm: GraphModule, rows: int, *, exact: bool = False, seed: int = 0, integer: int | None = None
) -> list[Any]:
    """Inputs for the placeholders of `gm` with every symbolic size `rows`. exact: floats as fp64.

    integer: all integers are that, and are not drawn.
    """
    with outside_fake_mode():
        generator = torch.Generator().manual_seed(seed)
        nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
        spans = [span_of(n, rows) if integer is None else (integer, integer + 1) for n in nodes]
        return [random_like(n.meta["val"], rows, generator, exact, *span) for n, span in zip(nodes, spans, strict=True)]


def random_like(value: Any, rows: int, generator: torch.Generator, exact: bool, low: int = 0, high: int = 2) -> Any:
    """A tensor as `value` says, where `generator` draws: floats normal, integers in [low, high); `rows` for a size, a
    number as it is.

    Along a stride of 0 (a view that `expand` made) there is one number, as often as the size says."""
    if not isinstance(value, Tensor):
        return size_with(value, rows) if isinstance(value, SymInt) else value
    shape, strides = [size_with(n, rows) for n in value.shape], [size_with(n, rows) for n in value.stride()]
    dtype = torch.float64 if exact and value.dtype.is_floating_point else value.dtype
    device = generator.device
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    drawn = tensor[tuple(slice(None) if stride else slice(1) for stride in strides)]
    if value.dtype.is_floating_point:
        drawn.copy_(torch.randn(drawn.shape, generator=generator, dtype=torch.float64, device=device).to(value.dtype))
    else:
        drawn.copy_(torch.randint(low, high, drawn.shape, generator=generator, device=device))
    return tensor


def span_of(node: Node, rows: int) -> tuple[int, int]:
    """From where to below what the integers of an input may be drawn.

    Below the smallest size they index, where they do nothing else; 1 and 2 where they divide; else 0 and 1.
    """
    value, sizes, other, stack = fake(node), list[int](), False, [node]
    if value is None or value.dtype not in (torch.int32, torch.int64):
        return 0, 2
    while stack:
        current = stack.pop()
        for user in current.users:
            if user.target in DIVISIONS and user.args[1] is current:
                return 1, 3
            if source_of_view(user) is current:
                stack.append(user)
            elif (indexed := _indexed(user, current)) is not None:
                sizes.append(size_with(indexed, rows))
            else:
                other = True
    return 0, 2 if other else max(1, min(sizes, default=2))


def _indexed(user: Node, index: Node) -> int | SymInt | None:
    """The size of the axis that `user` looks up by `index` alone; None where it does something else with it."""
    if user.target in INDEXED:
        source, at, axis = INDEXED[user.target]
        table = fake(user.args[source])
        if user.args[at] is index and user.args[source] is not index and table is not None:
            return table.shape[user.args[1] if axis is None else axis]  # type: ignore[index]
    elif user.target in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        table, indices = fake(user.args[0]), list(user.args[1])  # type: ignore[arg-type]
        if table is not None and index not in (user.args[0], *user.args[2:3]):
            sizes = (table.shape[axis] for axis, each in enumerate(indices) if each is index)
            return min(sizes, key=lambda n: size_with(n, 2))
    return None


def bytes_of(value: Tensor) -> int:
    """What a tensor of its sizes takes, with 2 for every symbol."""
    total = value.element_size()
    for size in value.shape:
        total *= size_with(size, 2)
    return total


# ---- comparing -------------------------------------------------------------------------------------------------------


def spec(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}"


def sharing(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the first one with the same storage."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [storages.index(storage) for storage in storages]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, zeros with their sign; all NaNs count as one."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    plain = [tensor.contiguous().view(bits).masked_fill(tensor.isnan(), 0) for tensor in (a, b)]
    return torch.equal(*plain)
