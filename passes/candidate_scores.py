"""candidate_scores: the body of a re-indexer on the candidates of each row, as a function of what executes it.

    candidate_blocks(call, kept [T, B], keep)      -> [T, K] the blocks that a row keeps, ascending, then -1
    rerun(site, call, read, blocks)                -> picks [T, k], by the nodes of the site's body, on other sizes

`call` executes an operation, or writes a node for it: so the same lines make the new program, and say before anything
is edited whether every size in the body has another in the new one. restrict_index_scores.py says why picks are the
same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from v41._compat import known_equal, symbols_of
from v41.passes.index_parts import same_count
from v41.passes.matching import RESHAPES, aten, fake, is_constant, prims
from v41.passes.re_indexers import Site
from v41.regions import body_of

ARITHMETIC = (operator.mul, operator.add, operator.sub, operator.floordiv, torch.sym_sum, torch.sym_min)
INT = {"dtype": torch.int64}
Call = Callable[..., Any]  # target and operands -> the result: a value, or the node that computes it


class Unsized(Exception):
    """A size from which it cannot be told what it counts."""

    def __init__(self, node: Node) -> None:
        self.node = node
        super().__init__(node.name)


def candidate_blocks(call: Call, kept: Any, keep: int) -> Any:
    """[T, K] the blocks that a row keeps, ascending, then -1, K = min(keep, B)."""
    count = call(aten.sym_size.int, kept, 1)
    device = _value(kept).device
    rank = call(prims.iota.default, count, start=count, step=-1, device=device, requires_grad=False, **INT)  # B .. 1
    none = call(aten.scalar_tensor.default, 0, device=device, **INT)
    ranks = call(aten.where.self, kept, rank, none)
    best = call(operator.getitem, call(aten.topk.default, ranks, call(torch.sym_min, count, keep)), 0)
    blocks = call(aten.add.Tensor, call(aten.neg.default, best), count)
    nothing = call(aten.scalar_tensor.default, -1, device=device, **INT)
    return call(aten.where.self, call(aten.gt.Scalar, best, 0), blocks, nothing)


def rerun(site: Site, call: Call, read: Callable[[Node], Any], blocks: Any) -> Any:
    """The picks, by the nodes of the site's body on the candidates of each row."""
    new = Restricted(site, call, read, blocks)
    for node in body_of(site.call).graph.nodes:
        if node.op == "call_function":
            new.run(node)
    (picks,) = body_of(site.call).graph.output_node().all_input_nodes
    return new.entries_at(new.env[picks])


class Restricted:
    """The operands of the body, and what its nodes give on them."""

    def __init__(self, site: Site, call: Call, read: Callable[[Node], Any], blocks: Any) -> None:
        self.site, self.call, self.read = site, call, read
        size, self.device = site.source["block"], _value(blocks).device
        self.rows = call(aten.sym_size.int, blocks, 0)
        self.count = call(aten.sym_size.int, blocks, 1)
        self.entries = call(operator.mul, self.count, size)
        in_block = call(prims.iota.default, size, start=0, step=1, device=self.device, requires_grad=False, **INT)
        first = call(aten.mul.Tensor, call(aten.clamp_min.default, blocks, 0), size)
        columns = call(aten.add.Tensor, call(aten.unsqueeze.default, first, 2), in_block)
        self.columns = call(aten.view.default, columns, [self.rows, self.entries])  # [T, C] as numbered before
        there = call(aten.unsqueeze.default, call(aten.ge.Scalar, blocks, 0), 2)
        there = call(aten.clone.default, call(aten.expand.default, there, [-1, -1, size]),
                     memory_format=torch.contiguous_format)  # fmt: skip
        self.env: dict[Node, Any] = {}
        self._enter(call(aten.view.default, there, [self.rows, self.entries]))

    def _enter(self, mask: Any) -> None:
        call, of = self.call, {role: self.read(node) for role, node in self.site.operands.items()}
        own = call(prims.iota.default, self.rows, start=0, step=1, device=self.device, requires_grad=False, **INT)
        scored = call(aten.index.Tensor, of["rows"], [of["requests"], of["columns"]])  # itself, unless it is a pad row
        given = {
            "candidates": mask,
            "slots": call(aten.index.Tensor, of["slots"], [of["requests"]]),
            "rows": call(aten.view.default, scored, [-1, 1]),
            "requests": own,
            "columns": call(aten.full.default, [self.rows], 0, device=self.device, **INT),
        }
        inner = [node for node in body_of(self.site.call).graph.nodes if node.op == "placeholder"]
        outer = self.site.call.args[2:]
        for placeholder, operand, role in zip(inner, outer, self.site.attrs["operands"], strict=True):
            assert isinstance(operand, Node)
            if role in ("size", "constant"):
                self.env[placeholder] = self.resized(operand)
            else:
                self.env[placeholder] = given[role] if role in given else self.read(operand)
            if same_count(placeholder, self.site.sizes["E"]) and role != "constant":
                self.env[placeholder] = self.of_candidates(self.env[placeholder])

    def resized(self, node: Node) -> Any:
        """A size, or a constant made of sizes, as it is in the new body."""
        value, sizes = node.meta["val"], self.site.sizes
        if isinstance(value, Tensor):
            if not is_constant(node):
                raise Unsized(node)
            return self.call(node.target, *self._resized(node.args), **self._resized(node.kwargs))
        if not symbols_of(value) & frozenset().union(*(symbols_of(sizes[name]) for name in "RQB")):
            return self.read(node)
        new = {"R": self.rows, "Q": 1, "E": self.entries, "B": self.count}
        known = next((name for name in new if known_equal(value, sizes[name])), None)
        if known is not None:
            return new[known]
        if node.target not in ARITHMETIC:
            raise Unsized(node)
        return self.call(node.target, *self._resized(node.args))

    def _resized(self, args: Any) -> Any:
        return map_aggregate(args, lambda arg: self.resized(arg) if isinstance(arg, Node) else arg)

    def run(self, node: Node) -> None:
        """Gives what `node` gives in the new body; entry numbers become those of each row's candidates."""
        operands = [arg for arg in node.all_input_nodes if fake(arg) is not None]
        numbered = [same_count(arg, self.site.sizes["E"]) and not is_constant(arg) for arg in operands]
        if node.target in RESHAPES and any(numbered):
            self.env[node] = self.env[operands[0]]  # an axis more or less: [T, C] has the axis of rows already
            return
        self.env[node] = self.call(node.target, *self._new(node.args), **self._new(node.kwargs))
        value = fake(node)
        whole = value is not None and value.dtype is torch.int64 and not is_constant(node)
        if whole and not any(numbered) and same_count(node, self.site.sizes["E"]):
            self.env[node] = self.of_candidates(self.env[node])

    def _new(self, args: Any) -> Any:
        return map_aggregate(args, lambda arg: self.env[arg] if isinstance(arg, Node) else arg)

    def of_candidates(self, counted: Any) -> Any:
        """[E], or with axes of size 1 -> [T, C] those of each row's candidates."""
        return self.call(aten.index.Tensor, self.call(aten.view.default, counted, [-1]), [self.columns])

    def entries_at(self, picks: Any) -> Any:
        """Picked columns -> what they were before; -1 stays."""
        call = self.call
        found = call(aten.gather.default, self.columns, 1, call(aten.clamp_min.default, picks, 0))
        nothing = call(aten.scalar_tensor.default, -1, device=self.device, **INT)
        return call(aten.where.self, call(aten.ge.Scalar, picks, 0), found, nothing)


def _value(x: Any) -> Tensor:
    value = x.meta["val"] if isinstance(x, Node) else x
    assert isinstance(value, Tensor)
    return value
