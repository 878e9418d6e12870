"""masks: whether values matter only where masks are true, found by running what reads them on numbers.

    keys = where(in_step, records[rows], behind)      what is read of `records` where in_step or visible is false
    attend(q, where(visible, decode(keys), 0))        reaches nothing

The values are drawn twice, alike where all masks are true and differing elsewhere. What they make differs, too, until
an operator that reads a mask makes both the same; from there on nothing differs. Where a difference is left at a
result, a write, a matrix product (what no mask has stopped there would run all layers behind it) or an operator that
does not run, the values matter.

Numbers drawn do not show all: k.clamp(min=50) is 50 for any of them, k == 7 never true, k.isnan() neither. So other
draws say nothing of numbers: what is made element by element differs wherever its operands do, whatever it computes,
until one that chooses by a mask chooses the same.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, ops
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from v41._compat import OpOverload, outside_fake_mode, size_with
from v41.passes.analysis.effects import effect_of
from v41.passes.matching import VIEWS, fake, shape
from v41.passes.same_values import same_bits
from v41.regions import body_of, invoke_subgraph

ROWS = 3  # for every symbol
TRIALS = ((0, False), (1, False), (0, True), (1, True))  # seed, and whether what differs is drawn anew
HELD = (Tensor, tuple, list)
PRODUCTS = (ops.aten.mm.default, ops.aten.bmm.default, ops.aten.addmm.default, ops.aten.baddbmm.default)
VIEWS_OF_ALL = (ops.aten.view.default, ops.aten._unsafe_view.default)
MOVES = (*VIEWS, ops.aten.cat.default, ops.aten.split.Tensor, ops.aten.split_with_sizes.default, operator.getitem)
# operator -> which operands may be the mask: where it is false (or true) nothing is read of the others
CHOOSES: dict[object, tuple[int, ...]] = {
    ops.aten.where.self: (0,),
    ops.aten.masked_fill.Scalar: (1,),
    ops.aten.masked_fill.Tensor: (1,),
    **dict.fromkeys((ops.aten.bitwise_and.Tensor, ops.aten.bitwise_or.Tensor), (0, 1)),
    **dict.fromkeys((ops.aten.logical_and.default, ops.aten.logical_or.default), (0, 1)),
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Ended = dict[tuple[object, ...], bool]  # whether a difference that enters a body here ends in it


def matter_only_where(gm: GraphModule, values: Node, masks: Sequence[Sequence[Node]], ended: Ended) -> bool:
    """Whether nothing that `gm` returns or writes depends on `values` where one of `masks` is false.

    A mask [T, W] stands for the first dimensions of `values` [T, W, ...]; it is all the nodes that compute it. `ended`
    remembers the bodies that layers share.
    """
    with outside_fake_mode(), torch.no_grad():
        return all(_try(gm, values, masks, trial, ended) for trial in TRIALS)


def _try(gm: GraphModule, values: Node, masks: Sequence[Sequence[Node]], trial: Trial, ended: Ended) -> bool:
    generator = torch.Generator().manual_seed(trial[0])
    drawn = {node: mask for same in masks for mask in [_random(same[0], generator)] for node in same}
    one = _random(values, generator)
    other = _other(one, generator) if trial[1] else _random(values, generator)
    true = torch.stack(list(drawn.values())).all(0)
    alike = true.view(*true.shape, *[1] * (one.ndim - true.ndim)).expand(one.shape)
    if one.dtype.itemsize == 1:  # few kernels take its type
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    differing = torch.where(alike, one, other)
    dtype = values.meta["val"].dtype
    return _Spread(gm, generator, drawn, ended, trial).ends({values: (one.view(dtype), differing.view(dtype))})


Pair = tuple[Any, Any]
Trial = tuple[int, bool]


class _Spread:
    """Runs what reads differing values, in order, on both of them."""

    def __init__(
        self, gm: GraphModule, generator: torch.Generator, known: Mapping[Node, Tensor], ended: Ended, trial: Trial
    ) -> None:
        self.ended, self.trial = ended, trial
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.generator, self.known = generator, dict[Node, Any](known)
        self.from_masks = dict.fromkeys(known)
        stack = list(known)
        while stack:
            made = [user for user in stack.pop().users if _is_mask(user) and user not in self.from_masks]
            self.from_masks |= dict.fromkeys(made)
            stack += made

    def ends(self, differing: dict[Node, Pair]) -> bool:
        """Whether the difference ends before it gets anywhere."""
        queue = [self.order[user] for node in differing for user in node.users]
        nodes = list(self.order)
        heapq.heapify(queue)
        done: set[int] = set()
        while queue:
            at = heapq.heappop(queue)
            if at in done:
                continue
            done.add(at)
            node = nodes[at]
            if "sym_size" in str(node.target):
                continue
            if node.op == "output" or effect_of(node) is not None or not isinstance(node.meta.get("val"), HELD):
                return False
            if node.target in PRODUCTS:
                return False
            if node.target is invoke_subgraph:
                if not self._ends_inside(node, differing):
                    return False
                continue
            both = self._run(node, differing)
            if both is not None and self.trial[1] and not self._chooses(node, differing):
                both = self._anew(node, both, differing)
            if both is None:
                return False
            if not (_same(*both) and any(arg in self.from_masks for arg in node.all_input_nodes)):
                differing[node] = both
                for user in node.users:
                    heapq.heappush(queue, self.order[user])
        return True

    def _ends_inside(self, call: Node, differing: dict[Node, Pair]) -> bool:
        body = body_of(call)
        inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
        outside = dict(zip(inputs, call.args[2:], strict=True))
        known = {each: self._value(arg) for each, arg in outside.items() if arg in self.from_masks}
        inner = {each: differing[arg] for each, arg in outside.items() if arg in differing}
        entered = (body, self.trial, *known, None, *inner)
        if entered not in self.ended:
            self.ended[entered] = _Spread(body, self.generator, known, self.ended, self.trial).ends(inner)
        return self.ended[entered]

    def _run(self, node: Node, differing: dict[Node, Pair]) -> Pair | None:
        """What `node` makes of both."""
        made = []
        for side in (0, 1):
            given = {arg: differing[arg][side] for arg in node.all_input_nodes if arg in differing}
            try:
                made.append(self._call(node, given))
            except (RuntimeError, IndexError, TypeError, NotImplementedError):  # numbers that it does not take
                return None
        return made[0], made[1]

    def _chooses(self, node: Node, differing: Mapping[Node, Pair]) -> bool:
        """Whether it reads of what differs what a mask says, and nothing else."""
        masks = (node.args[at] for at in CHOOSES.get(node.target, ()))
        return any(mask in self.from_masks and mask not in differing for mask in masks)

    def _anew(self, node: Node, made: Pair, differing: Mapping[Node, Pair]) -> Pair | None:
        """What is made element by element, with other numbers wherever operands differ. What only moves elements has
        drawn ones already. Of anything else a difference that does not show is not known to be none."""
        if not _is_pointwise(node):
            return made if node.target in MOVES or not _same(*made) else None
        one = made[0]
        operands = [differing[arg] for arg in node.all_input_nodes if arg in differing]
        if not isinstance(one, Tensor) or not all(isinstance(each, Tensor) for each, _ in operands):
            return None
        apart = torch.zeros(one.shape, dtype=torch.bool)
        for a, b in operands:
            apart |= (_bits(a) != _bits(b)).expand(one.shape)
        drawn = _random(node, self.generator)
        return _where(apart, drawn, one), _where(apart, _other(drawn, self.generator), one)

    def _call(self, node: Node, given: Mapping[Node, Any]) -> Any:
        def number(arg: Any) -> Any:
            if isinstance(arg, torch.device):
                return torch.device("cpu")
            return arg if not isinstance(arg, Node) else given[arg] if arg in given else self._value(arg)

        args, kwargs = map_aggregate((node.args, node.kwargs), number)
        target: Any = ops.aten.reshape.default if node.target in VIEWS_OF_ALL else node.target
        return target(*args, **kwargs)

    def _value(self, node: Any) -> Any:
        """What is known of `node`: a mask, what is made of masks, a size; else numbers, the same each time."""
        if node not in self.known:
            if node in self.from_masks:
                self.known[node] = self._call(node, {})
            else:
                self.known[node] = _random(node, self.generator)
        return self.known[node]


def _is_mask(node: Node) -> bool:
    value = fake(node)
    return node.op == "call_function" and value is not None and value.dtype is torch.bool


def _is_pointwise(node: Node) -> bool:
    """Whether it makes each element of the elements that broadcasting puts there."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _random(node: Node, generator: torch.Generator) -> Any:
    """Of the shape and type of `node`."""
    value = fake(node)
    if value is None:
        return size_with(node.meta["val"], ROWS)
    size = [size_with(each, ROWS) for each in shape(node)]
    if value.dtype is torch.bool:
        return torch.rand(size, generator=generator) < 0.5
    if value.dtype.itemsize == 1:
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(value.dtype)
    if value.is_floating_point():
        return torch.randn(size, generator=generator).to(value.dtype)
    return torch.randint(0, 2, size, generator=generator).to(value.dtype)


def _other(one: Tensor, generator: torch.Generator) -> Tensor:
    """Of each number another one."""
    if one.dtype is torch.bool:
        return ~one
    if one.dtype.itemsize == 1:
        return (_bits(one) ^ torch.randint(1, 256, one.shape, generator=generator, dtype=torch.uint8)).view(one.dtype)
    if one.is_floating_point():
        return (one + 2 + torch.rand(one.shape, generator=generator)).to(one.dtype)
    return 1 - one


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(BITS.get(value.dtype.itemsize, value.dtype))


def _where(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(mask, _bits(a), _bits(b)).view(b.dtype)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return all(map(_same, a, b))
    return same_bits(a, b)
