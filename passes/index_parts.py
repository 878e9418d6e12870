"""index_parts: what the scores of a sparse attention's indexer are made of.

    scores[t, e] = scale * sum_h w[t, h] relu(q[t, h] . k[r(t), e])        r(t): the request of row t, if keys differ

They are known by what their nodes do to numbers (analysis/probe.py): how heads are summed, in how many chunks, by which
product, does not matter. What is done with scores is in index_choice.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from v41._compat import known_equal, outside_fake_mode, size_with
from v41.passes.analysis.probe import ROWS, evaluate, integers
from v41.passes.matching import (
    RESHAPES,
    aten,
    between,
    fake,
    is_constant,
    is_pointwise,
    is_widening,
    operator,
    shape,
    source_of_view,
)

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
PARTS = (*SPLITS, aten.slice.Tensor)
SPREADS = (aten.expand.default, aten.clone.default, *RESHAPES)
LINEAR = (aten.mul.Tensor, aten.sum.dim_IntList, aten.add.Tensor, aten.mm.default, aten.bmm.default, aten.index.Tensor)
DECODES = (*PARTS, *SPREADS, aten.cat.default, aten.view.dtype, aten.stack.default)
FAILURES = (RuntimeError, AssertionError, TypeError, IndexError)  # of nodes that need what is not given
DRAWS = 3
GROUP = 32  # channels under one scale of an MXFP4 record
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Scored:
    """The scores of one indexer, [T, E], before anything is hidden."""

    order: Mapping[Node, int]
    rectified: tuple[Node, ...]  # of each chunk of heads
    scores: Node

    # ---- what is scored

    @cached_property
    def chain(self) -> dict[Node, None]:
        """All nodes from the rectified products to the scores."""
        return {node: None for start in self.rectified for node in chain_of(start)}

    @cached_property
    def _factors(self) -> tuple[set[Node], set[Node], set[Node]] | None:
        """Queries as they enter the products, keys, and the maps that say which row stands where."""
        queries, keys, rows = set[Node](), set[Node](), set[Node]()
        for start in self.rectified:
            pair = [walk(each, _same_numbers) for each in product_of(start) or ()]
            holds = [self._entry_axis(each) == len(shape(each)) - 2 for each in pair]
            if not any(holds):  # what decodes keys may end on groups of channels, which a view joins
                holds = [self._entry_axis(each) is not None for each in pair]
            if sum(holds) != 1:
                return None
            query, row = _through_rows(pair[holds.index(False)])
            queries.add(query)
            keys.add(pair[holds.index(True)])
            rows.update(row)
        return queries, keys, rows

    def _entry_axis(self, keys: Node) -> int | None:
        """The last axis that counts entries; behind it are channels."""
        sizes = shape(keys)
        return next((i for i in reversed(range(len(sizes) - 1)) if known_equal(sizes[i], self.entry_count)), None)

    @cached_property
    def query(self) -> Node | None:
        return only(self._factors[0]) if self._factors else None

    @cached_property
    def keys(self) -> Node | None:
        """Decoded, [R, E, d] or [E, d]; d may lie in several axes."""
        return only(self._factors[1]) if self._factors else None

    @property
    def width(self) -> int | SymInt:
        """d, the channels of a key."""
        assert self.keys is not None
        axis = self._entry_axis(self.keys)
        assert axis is not None
        return math.prod(shape(self.keys)[axis + 1 :])

    @cached_property
    def _weights(self) -> tuple[set[Node], set[Node]]:
        sources, rows = set[Node](), set[Node]()
        for node in self.chain:
            if node.target in (aten.mul.Tensor, aten.mm.default, aten.bmm.default):
                for arg in node.all_input_nodes:
                    if arg not in self.chain and arg not in self.rectified:
                        source, row = _through_rows(walk(arg, _same_numbers))
                        sources.add(walk(source, lambda node: _same_numbers(node) or _scales(node)))
                        rows.update(row)
        return sources, rows

    @cached_property
    def weights(self) -> Node | None:
        """[T, H], before it is scaled."""
        return only(self._weights[0])

    @cached_property
    def rows(self) -> Node | None:
        """[R, Q] the row that stands there; None where rows are scored as they come."""
        return only({*(self._factors[2] if self._factors else ()), *self._weights[1]})

    @cached_property
    def places(self) -> tuple[Node, ...]:
        """Request and column of each row [T], by which scores come back to rows; () where they never left."""
        taken = [node.args[1] for node in self.chain if node.target is aten.index.Tensor]
        return tuple(taken[0]) if len(taken) == 1 and None not in taken[0] else ()  # type: ignore[arg-type, operator]

    @property
    def entry_count(self) -> int | SymInt:
        return shape(self.scores)[-1]

    @cached_property
    def scale(self) -> float | None:
        """What all scores are multiplied with; None where they are no sum over heads of weighed, rectified products."""
        given = [node for node in (self.query, self.keys, self.weights, self.rows, *self.places) if node is not None]
        if None in (self.query, self.keys, self.weights) or len(self.places) not in (0, 2):
            return None
        nodes = self.run(given, self.scores)
        scales = set[float]()
        for seed in range(DRAWS):
            with outside_fake_mode():
                drawn = {node: integers(node, 7 * seed + i) for i, node in enumerate(given)}
                for node, taken in self._indexed():
                    drawn[node] = drawn[node].abs().long() % size_with(taken, ROWS)
                try:
                    found = evaluate(nodes, drawn, self.scores)
                    wanted = self._score(drawn)
                except FAILURES:
                    return None
                if found.shape != wanted.shape or not wanted.any():
                    return None
                scale = float((found * wanted).sum() / (wanted * wanted).sum())
                if not torch.allclose(found, scale * wanted, 1e-9, 0):
                    return None
                scales.add(torch.tensor(scale, dtype=torch.float32).item())
        return scales.pop() if len(scales) == 1 else None

    def _indexed(self) -> list[tuple[Node, int | SymInt]]:
        """Each index on the way to the scores, and how much it chooses from."""
        if self.rows is None or self.query is None:
            return []
        found = [(self.rows, shape(self.query)[0])]
        return found + list(zip(self.places, shape(self.rows), strict=False))

    def _score(self, drawn: Mapping[Node, Tensor]) -> Tensor:
        assert self.query is not None and self.keys is not None and self.weights is not None
        axis = self._entry_axis(self.keys)
        assert axis is not None
        q, k, w = drawn[self.query], drawn[self.keys].flatten(axis + 1), drawn[self.weights]
        if self.rows is not None:
            q, w = q[drawn[self.rows]], w[drawn[self.rows]]
        scores = torch.einsum("...qh,...qhe->...qe", w, torch.einsum("...qhd,...ed->...qhe", q, k).relu())
        return scores[tuple(drawn[node] for node in self.places)] if self.places else scores

    # ---- how keys are stored

    @cached_property
    def _stored(self) -> tuple[Node, Node | None, tuple[Node, ...]] | None:
        """Bytes of the keys; the cache they are taken from by indices, if they are."""
        if self.keys is None:
            return None
        leaves, seen, stack = set[Node](), set[Node](), [self.keys]
        while stack:
            node = stack.pop()
            if node.target in DECODES or is_pointwise(node) or _takes_part(node):
                fresh = [arg for arg in node.all_input_nodes if arg not in seen and not _is_number(arg)]
                seen.update(fresh)
                stack += fresh
            elif not is_constant(node):
                leaves.add(node)
        records = only(leaves)
        if records is None or fake(records).dtype is not torch.uint8 or not self._decodes(records):  # type: ignore[union-attr]
            return None
        match records.target, records.args:
            case aten.index.Tensor, (Node() as cache, [Node() as slots, Node() as at]):
                return records, cache, (slots, at)
        return records, None, ()

    def _decodes(self, records: Node) -> bool:
        """Whether the keys are what MXFP4 records say."""
        assert self.keys is not None
        with outside_fake_mode():
            width = self.width
            if not isinstance(width, int) or width % GROUP or shape(records)[-1] != width // 2 + width // GROUP:
                return False
            sizes = [size_with(size, ROWS) for size in shape(records)]
            draw = torch.Generator().manual_seed(0)
            data = torch.randint(0, 256, sizes, generator=draw)[..., : width // 2]
            scales = torch.randint(120, 135, sizes, generator=draw)[..., : width // GROUP]
            record = torch.cat((data, scales), -1).to(torch.uint8)
            try:
                found = evaluate(self.run([records], self.keys), {records: record}, self.keys, keep_types=True)
            except FAILURES:
                return False
            return torch.equal(found.float().flatten(), decoded(record, width).flatten())

    @property
    def records(self) -> Node | None:
        """[R, E, bytes], None where keys are not kept as MXFP4 records."""
        return self._stored[0] if self._stored else None

    @property
    def cache(self) -> Node | None:
        """[slots, capacity, bytes], None where nothing is gathered."""
        return self._stored[1] if self._stored else None

    @property
    def at(self) -> tuple[Node, ...]:
        """Slot of each request and entry of each column, as the cache is indexed."""
        return self._stored[2] if self._stored else ()

    # ---- running

    def run(self, given: Collection[Node], result: Node) -> list[Node]:
        """The nodes between `given` and `result`, and the constants they read."""
        nodes = between(self.order, given, [result])
        constants = {arg for node in nodes for arg in node.all_input_nodes if is_constant(arg) and arg not in given}
        return sorted({*nodes, *constants}, key=self.order.__getitem__)


def decoded(record: Tensor, width: int) -> Tensor:
    """fp32 numbers of MXFP4 records: e2m1 pairs, the even channel low, then a power of two for each group."""
    pairs, scales = record[..., : width // 2].long(), record[..., width // 2 :].float()
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    values = torch.tensor((*E2M1, *(-each for each in E2M1)))[codes].unflatten(-1, (-1, GROUP))
    return (values * (2.0 ** (scales - 127)).unsqueeze(-1)).flatten(-2)


def same_count(node: Node, count: int | SymInt) -> bool:
    """Whether `node` is a vector of so many numbers, axes of size 1 aside."""
    sizes = [size for size in shape(node) if not known_equal(size, 1)]
    return len(sizes) == 1 and known_equal(sizes[0], count)


# ---- walking


def chain_of(start: Node) -> list[Node]:
    """`start` and the linear operations behind it, each the only one to read the one before."""
    chain = [start]
    while True:
        linear = [u for u in chain[-1].users if u.target in LINEAR or u.target in SPREADS or is_widening(u)]
        if len(linear) != 1:
            return chain
        chain += linear


def rectifies(node: Node) -> bool:
    zero = len(node.args) > 1 and isinstance(node.args[1], (int, float)) and node.args[1] == 0
    return node.target is aten.relu.default or (node.target is aten.clamp_min.default and zero)


def product_of(node: Node) -> tuple[Node, Node] | None:
    """The factors of the product that is rectified; a product of tensors summed over its last axis is one, too."""
    product = walk(node.args[0], lambda each: each.target in SPREADS)  # type: ignore[arg-type]
    match product.target, product.args:
        case (aten.mm.default | aten.bmm.default), (Node() as a, Node() as b):
            return a, b
        case aten.sum.dim_IntList, (Node(target=aten.mul.Tensor, args=(Node() as a, Node() as b)), [axis], *_):
            return (a, b) if axis == len(shape(product.args[0])) - 1 else None  # type: ignore[arg-type]
    return None


def walk(node: Node, through: Callable[[Node], bool]) -> Node:
    """What `node` is made of, step by step to its first operand."""
    while through(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _through_rows(node: Node) -> tuple[Node, list[Node]]:
    """What rows `node` takes from, and by which index."""
    match node.target, node.args:
        case aten.index.Tensor, (Node() as source, [Node() as rows]):
            return walk(source, _same_numbers), [rows]
    return node, []


def _same_numbers(node: Node) -> bool:
    return node.target in PARTS or _takes_part(node) or node.target in SPREADS or is_widening(node)


def _takes_part(node: Node) -> bool:
    source = node.args[0] if node.args else None
    return node.target is operator.getitem and isinstance(source, Node) and source.target in SPLITS


def _scales(node: Node) -> bool:
    return node.target is aten.mul.Tensor and isinstance(node.args[1], (int, float))


def adds_axes(node: Node) -> bool:
    """Whether it is a view that only adds or drops axes of size 1."""
    source = source_of_view(node)
    if source is None:
        return False
    sizes = [[size for size in shape(each) if not known_equal(size, 1)] for each in (node, source)]
    return len(sizes[0]) == len(sizes[1])


def _is_number(node: Node) -> bool:
    return fake(node) is None and node.target not in SPLITS


def only(nodes: Iterable[Node]) -> Node | None:
    found = list(nodes)
    return found[0] if len(found) == 1 else None
