"""experts_parts: the parts of a mixture's experts as they lie in a canonical ATen graph. Found and run, not judged.

    rows     x taken by token for every pick; as they are, or rounded by groups, in front of a product
    expert   products with W1 and W3 (or one with both) -> activation -> product with W2
    routing  which token and which expert each row of the grouped products has, on drawn picks

Walks go backwards and end at products, at gathers and at subgraph calls, so a site costs what it holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx import Node

from v41._compat import known_equal, outside_fake_mode
from v41.passes.analysis.effects import effect_of
from v41.passes.analysis.probe import ROWS, evaluate, numbers
from v41.passes.matching import VIEWS, aten, cone, fake, is_constant, is_widening, same_sizes, shape, unviewed
from v41.passes.number_formats import read_format
from v41.passes.stored_weights import Weight, read_weight
from v41.regions import invoke_subgraph

GROUPED = aten._grouped_mm.default
DENSE = (aten.mm.default, aten.bmm.default)
CLOSED = (GROUPED, *DENSE, aten.addmm.default, aten.baddbmm.default, aten.convolution.default, invoke_subgraph)
GATHERS = (aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default)
TAKES = (*GATHERS, *VIEWS, aten.clone.default)  # what a gather of whole rows consists of
LONGEST = 64  # nodes that round a row
SLACK = 2.0**-18  # of a value: what fp32 arithmetic may miss, far below any narrower type


# ---- walking


def is_open(node: Node) -> bool:
    """Whether to look behind `node`: not behind a product, a subgraph call, or what has an effect."""
    return node.target not in CLOSED and not node.is_impure() and effect_of(node) is None


def origins(order: Mapping[Node, int], node: Node) -> list[Node]:
    """Products, gathers, subgraph calls and inputs that `node` is computed from, in graph order."""
    return cone(order, node, (), lambda each: is_open(each) and each.target not in GATHERS)[1]


def computed(order: Mapping[Node, int], given: Mapping[Node, Tensor], result: Node, *, types: bool) -> Tensor | None:
    """What `result` is, run on `given`, in fp64 or in its own types; None where it takes more, or does not run."""
    nodes, read = cone(order, result, given, is_open)
    if result not in nodes or any(node not in given for node in read):
        return None
    try:
        return evaluate(nodes, dict(given), result, keep_types=types)
    except (RuntimeError, AssertionError, TypeError, IndexError):  # it does not take such numbers
        return None


def only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


# ---- rows


class Rows(NamedTuple):
    """What a product multiplies: `source`, rounded by groups to `format`, or as it is in its own type."""

    source: Node
    format: str


def rows_of(order: Mapping[Node, int], node: Node) -> Rows:
    """The rows `node` before they are rounded: at a node that all paths go through, where that gives a known format."""
    passed: list[Node] = []
    waiting = [(-order[node], node)]
    while waiting and len(passed) < LONGEST:
        _, current = heapq.heappop(waiting)
        if current.op != "call_function" or current.target in GATHERS or not is_open(current):
            break
        passed.append(current)
        for arg in current.all_input_nodes:
            if is_constant(arg):
                passed.append(arg)
            elif fake(arg) is not None and (-order[arg], arg) not in waiting:
                heapq.heappush(waiting, (-order[arg], arg))
        if len(waiting) == 1:
            source = waiting[0][1]
            found = read_format(sorted(dict.fromkeys(passed), key=order.__getitem__), source, node)
            if found is not None:
                return Rows(source, f"{found.name}/{found.group}")
    return Rows(node, str(fake(node).dtype).removeprefix("torch."))  # type: ignore[union-attr]


def gathered(node: Node, wanted: tuple[int | SymInt, ...]) -> Node | None:
    """What has the shape `wanted` behind one or more gathers of rows."""
    crossed = False
    while not (crossed and same_sizes(shape(node), wanted)):
        if node.target not in TAKES and not is_widening(node):
            return None
        crossed |= node.target in GATHERS
        node = node.args[0]  # type: ignore[assignment]
    return base_of(node)


def base_of(node: Node) -> Node:
    """What `node` is up to views and widening casts, as far as that has its shape."""
    return [form for form in unviewed(node) if same_sizes(shape(form), shape(node))][-1]


def picks_of(order: Mapping[Node, int], ends: Node, rows: int | SymInt) -> Node | None:
    """The integers [T, k] that `ends` is computed from, one for each of `rows`."""
    found: dict[Node, None] = {}
    seen, stack = set[Node](), [ends]
    while stack:
        node = stack.pop()
        if _is_table(node, rows):
            found[base_of(node)] = None
            continue
        if node.op == "call_function" and is_open(node):
            stack += [arg for arg in node.all_input_nodes if arg not in seen]
            seen.update(node.all_input_nodes)
    return min(found, key=order.__getitem__, default=None)


def _is_table(node: Node, count: int | SymInt) -> bool:
    """Whether `node` holds `count` integers as rows and columns; one column of a list is still that list."""
    value = fake(node)
    if value is None or value.ndim != 2 or value.is_floating_point() or not isinstance(value.shape[1], int):
        return False
    *_, base = unviewed(node)
    return known_equal(value.shape[0] * value.shape[1], count) and (value.shape[1] > 1 or len(shape(base)) > 1)


# ---- experts


class Swiglu(NamedTuple):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * a factor: which of those asked, by position."""

    limit: float | None
    gate: Node
    factor: int
    rounded_once: bool


@dataclass(frozen=True)
class Expert:
    """ups: the products with W1 and W3, or the one with both; down: the product with W2."""

    order: Mapping[Node, int]
    ups: tuple[Node, ...]
    down: Node

    @cached_property
    def activation(self) -> Rows:
        return rows_of(self.order, self.down.args[0])  # type: ignore[arg-type]

    @cached_property
    def inputs(self) -> tuple[Rows, ...]:
        return tuple(rows_of(self.order, up.args[0]) for up in self.ups)  # type: ignore[arg-type]

    @cached_property
    def weights(self) -> dict[Node, Weight]:
        """Product -> how its weight is stored."""
        return {node: read_weight(self.order, node.args[1]) for node in (*self.ups, self.down)}  # type: ignore[arg-type]

    def formats(self, before: str | None = None) -> tuple[str, str] | None:
        """Of the weights, and of what they are multiplied with; None where these are several.

        before: of the rows of W1 and W3, where they were rounded before they were gathered.
        """
        weights = dict.fromkeys(weight.format for weight in self.weights.values())
        rows = dict.fromkeys([*(before or each.format for each in self.inputs), self.activation.format])
        return (next(iter(weights)), next(iter(rows))) if len(weights) == len(rows) == 1 else None

    def swiglu(self, given: Mapping[Node, Tensor], factors: Sequence[Tensor | float]) -> Swiglu | None:
        """What the activation is, on drawn outputs of W1 and W3 and what else is `given`; None if no such thing."""
        source = self.activation.source
        limits = [None, *dict.fromkeys(self._numbers({*given, *self.ups}))]
        with outside_fake_mode():
            made = {up: self._outputs(up, i, limits) for i, up in enumerate(self.ups)}
            found = computed(
                self.order, {**given, **{up: value.double() for up, value in made.items()}}, source, types=False
            )
            if found is None:
                return None
            for gate, up in permutations(self.ups) if len(self.ups) == 2 else [self.ups * 2]:
                left, right = (made[gate].chunk(2, -1)) if gate is up else (made[gate], made[up])
                for limit in limits:
                    for index, factor in enumerate(factors):
                        wanted = _swiglu(left.double(), right.double(), limit) * factor
                        if close(found, wanted, 1e-8):
                            typed = computed(self.order, {**given, **made}, source, types=True)
                            return Swiglu(limit, gate, index, close(typed, wanted, half_ulp(source) + SLACK))
        return None

    def _numbers(self, given: Collection[Node]) -> Iterator[float]:
        """Positive numbers among the arguments of the activation: one of them may be the limit."""
        for node in cone(self.order, self.activation.source, given, is_open)[0]:
            for arg in node.args:
                if isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg > 0:
                    yield float(arg)

    @staticmethod
    def _outputs(up: Node, seed: int, limits: Sequence[float | None]) -> Tensor:
        """Numbers in the type of a product, every other row as large as the largest limit."""
        z = numbers(up, seed)
        z[..., ::2, :] *= max(filter(None, limits), default=1.0)
        return z.to(fake(up).dtype)  # type: ignore[union-attr]


def _swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return F.silu(gate) * up if limit is None else F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def close(found: Tensor | None, wanted: Tensor, relative: float, size: Tensor | None = None) -> bool:
    """Whether all of `found` is within `relative` of `wanted`, measured by `size` if given."""
    if found is None or found.numel() != wanted.numel() or not found.isfinite().all():
        return False
    size = wanted.abs() if size is None else size
    return bool(((found.double().reshape(wanted.shape) - wanted).abs() <= relative * size + 1e-30).all())


def expert_of(order: Mapping[Node, int], down: Node) -> Expert | None:
    """The expert whose W2 is multiplied in `down`; None where that reads no one or two products of its kind."""
    expert = Expert(order, (), down)
    kind = (GROUPED,) if down.target is GROUPED else DENSE
    found = [node for node in origins(order, expert.activation.source) if node.target in kind]
    same_ends = all(node.args[2:] == down.args[2:] and not node.kwargs for node in (*found, down))
    return Expert(order, tuple(found), down) if len(found) in (1, 2) and same_ends else None


# ---- routing


class Routing(NamedTuple):
    """Drawn picks [T, k], and for each row of the grouped products its token and which pick of that it is."""

    picks: Tensor
    token: Tensor
    place: Tensor


def routing(
    order: Mapping[Node, int], picks: Node, x: Node, rows: Sequence[Node], ends: Node, seed: int
) -> Routing | None:
    """Where `rows` come from and `ends` end, on drawn numbers; None if not by expert, or not each pick once."""
    count: int = shape(ends)[0]  # type: ignore[assignment]
    with outside_fake_mode():
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(ROWS, count, generator=generator).argsort(-1)[:, : shape(picks)[1]]
        if seed == 0:
            chosen = chosen[:1].repeat(ROWS, 1)  # all alike, and most experts without a row
        given = {picks: chosen.to(fake(picks).dtype), x: numbers(x, seed).to(fake(x).dtype)}  # type: ignore[union-attr]
        sizes = torch.bincount(chosen.flatten(), minlength=count)
        found = computed(order, given, ends, types=True)
        first, *others = [_tokens(computed(order, given, each, types=True), given[x]) for each in rows]
        if found is None or first is None or not torch.equal(found.flatten().long(), sizes.cumsum(0)):
            return None
        if any(each is None or not torch.equal(each, first) for each in others):
            return None
        expert = torch.arange(count).repeat_interleave(sizes)
        pairs, wanted = first * count + expert, torch.arange(ROWS).unsqueeze(-1) * count + chosen
        once = torch.equal(pairs.sort().values, wanted.flatten().sort().values)
        place = (chosen[first] == expert[:, None]).int().argmax(-1)
        return Routing(given[picks], first, place) if once else None


def _tokens(rows: Tensor | None, x: Tensor) -> Tensor | None:
    """Which row of x each of `rows` is; None where one is none, or not one alone."""
    if rows is None:
        return None
    same = (rows[:, None] == x).all(-1)
    return same.int().argmax(-1) if bool((same.sum(-1) == 1).all()) else None


def sum_of(
    order: Mapping[Node, int], down: Node, drawn: Routing, given: Mapping[Node, Tensor], wanted: Sequence[int | SymInt]
) -> Node | None:
    """The last value of that shape, made of rows of `down` and the picks alone, that adds up those of each token.

    Not a view of that, or what it is widened to: whoever reads it may do so.
    """
    with outside_fake_mode():
        y = numbers(down, 1)
        total = torch.zeros(ROWS, y.shape[-1], dtype=y.dtype).index_add(0, drawn.token, y)
    found, seen, waiting = None, set[Node](), [down]
    while waiting:
        for user in waiting.pop().users:
            value = None if user in seen else computed(order, {down: y, **given}, user, types=False)
            seen.add(user)
            if value is not None:
                waiting.append(user)
                late = found is None or order[user] > order[found]
                if late and same_sizes(shape(user), tuple(wanted)) and close(value, total, 1e-8):
                    found = user
    same = [] if found is None else [node for node in unviewed(found) if same_sizes(shape(node), tuple(wanted))]
    return same[-1] if same else None


def adds_once(order: Mapping[Node, int], down: Node, drawn: Routing, given: Mapping[Node, Tensor], total: Node) -> bool:
    """Whether `total`, run in its own types, is a sum in fp32 that is rounded at its end at most."""
    with outside_fake_mode():
        y = numbers(down, 2).to(fake(down).dtype)  # type: ignore[union-attr]
        zeros = torch.zeros(ROWS, y.shape[-1], dtype=torch.float64)
        wanted, size = (zeros.index_add(0, drawn.token, each.double()) for each in (y, y.abs()))
        found = computed(order, {down: y, **given}, total, types=True)
        return close(found, wanted, 1, half_ulp(total) * wanted.abs() + SLACK * size)


def half_ulp(node: Node) -> float:
    """What rounding to the type of `node` may change, of a value."""
    return torch.finfo(fake(node).dtype).eps / 2  # type: ignore[union-attr]
