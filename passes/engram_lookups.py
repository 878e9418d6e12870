"""engram_lookups: where a canonical graph looks up rows of tables by hashes of the last token ids.

    ids -> c [T, N] -> hash_k = xor_s c_s mu_s, s up to k -> modulo a prime a head, offset -> rows of a table -> numbers
    (groups of fp8 are decoded) -> [T, tables * width], perhaps quantised for a product

Found by the remainder of a hash that a table is indexed with. Hash and decoding are read by running their nodes on
numbers (analysis/probe.py): spelling does not matter. Nothing here judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from v41._compat import known_equal, outside_fake_mode
from v41.passes.analysis.probe import evaluate, numbers
from v41.passes.matching import (
    RESHAPES,
    VIEWS,
    absorb,
    aten,
    cone,
    fake,
    is_constant,
    is_part,
    is_pointwise,
    same_sizes,
    shape,
)
from v41.passes.records import decode, random_records
from v41.passes.row_tails import CROSSED, Tail

LOOKUP = "engram_lookup"
MODULO = (aten.remainder.Tensor, aten.remainder.Scalar)
FAR = 64  # nodes behind a look-up that are looked at; decoding and quantising take 40


class Hash(NamedTuple):
    """multipliers: of each slot; orders: how many slots each hash mixes."""

    multipliers: tuple[int, ...]
    orders: tuple[int, ...]


@dataclass(frozen=True)
class Lookup:
    """modulo: the remainder of all hashes; takes: where tables are indexed with it."""

    order: Mapping[Node, int]
    outermost: bool  # its program's inputs are the caller's
    modulo: Node
    takes: tuple[Node, ...]
    kind = LOOKUP

    @property
    def anchor(self) -> Node:
        return self.takes[0]

    @cached_property
    def tables(self) -> tuple[Node, ...]:
        return tuple(taken[0] for node in self.takes if (taken := _taken(node)) is not None)

    @cached_property
    def hashing(self) -> tuple[list[Node], Node] | None:
        """From the ids of all slots, which come second, to the hashes."""
        nodes, read = cone(self.order, self.modulo.args[0], (), _may_hash)  # type: ignore[arg-type]
        slots = [node for node in read if same_sizes(shape(node)[:1], shape(self.modulo)[:1])]
        return (nodes, slots[0]) if len(read) == 1 and len(slots) == 1 and len(shape(slots[0])) == 2 else None

    @cached_property
    def hash(self) -> Hash | None:
        """The hashes, if each is the xor of its first slots, multiplied."""
        if self.hashing is None:
            return None
        nodes, ids = self.hashing
        slots = shape(ids)[-1]
        if not isinstance(slots, int):
            return None

        def hashed(c: Tensor) -> Tensor:
            found = evaluate(nodes, {ids: c}, self.modulo.args[0], keep_types=True)  # type: ignore[arg-type]
            return found.reshape(c.shape[0], -1)

        with outside_fake_mode():
            rows = numbers(ids, 0).shape[0]
            units = [torch.zeros(rows, slots, dtype=torch.int64) for _ in range(slots)]
            for s, unit in enumerate(units):
                unit[:, s] = 1
            factors = torch.stack([hashed(unit)[0] for unit in units])  # [slots, hashes]
            drawn = torch.randint(0, 2**15, (rows, slots), generator=torch.Generator().manual_seed(1))
            wanted = torch.zeros_like(hashed(drawn))
            for s in range(slots):
                wanted = wanted ^ drawn[:, s, None] * factors[s]
            orders = (factors != 0).sum(0)
            first = torch.arange(slots)[:, None] < orders
            alike = torch.where(first, factors.amax(1, keepdim=True), 0)
            if not torch.equal(wanted, hashed(drawn)) or not torch.equal(alike, factors):
                return None
            return Hash(tuple(factors.amax(1).tolist()), tuple(orders.tolist()))

    @cached_property
    def ahead(self) -> list[Node]:
        """What is made of rows of the tables alone, in graph order."""
        found = dict.fromkeys(self.takes)
        for node in (queue := list(self.takes)):  # grows as it is walked
            for user in node.users:
                may = is_pointwise(user) or user.target in CROSSED
                if user not in found and may and all(a in found or is_constant(a) for a in user.all_input_nodes):
                    found[user] = None
                    queue.append(user)
            if len(queue) > FAR:
                break
        return sorted(found, key=self.order.__getitem__)

    @cached_property
    def stored(self) -> tuple[str, Node] | None:
        """How a table holds a row, and the node that has the numbers."""
        if len(self.takes) == 1:
            value = fake(self.takes[0])
            return (str(value.dtype).removeprefix("torch."), self.takes[0]) if value.is_floating_point() else None  # type: ignore[union-attr]
        data, scale = sorted(self.takes, key=lambda node: -int(shape(node)[-1]))[:2]
        held, whole = shape(scale)[-1], shape(data)
        assert isinstance(held, int)
        record = random_records((*whole[:-1], int(whole[-1]) + held), "e4m3", "ue8m0", held)
        given = {data: record[..., :-held].contiguous(), scale: record[..., -held:].contiguous()}
        for node in self.ahead if len(self.takes) == 2 else ():
            value, raw = fake(node), fake(data)
            assert value is not None and raw is not None
            if value.dtype not in (torch.bfloat16, torch.float16) or not known_equal(value.numel(), raw.numel()):
                continue
            steps, _ = cone(self.order, node, self.takes, set(self.ahead).__contains__)
            found = evaluate(steps, given, node, keep_types=True)
            with outside_fake_mode():
                wanted = decode(record, "e4m3", "ue8m0", held).to(found.dtype).reshape(found.shape)
                return (f"fp8/{int(whole[-1]) // held}", node) if torch.equal(found, wanted) else None
        return None

    @cached_property
    def rows(self) -> Node:
        """The numbers of all tables side by side: the last view of them that all read."""
        assert self.stored is not None
        _, node = self.stored
        while len(node.users) == 1 and (user := next(iter(node.users))).target in RESHAPES:
            node = user
        return node

    @cached_property
    def tail(self) -> Tail:
        return Tail(self.order, self.rows)

    @property
    def exits(self) -> set[Node | None]:
        return {self.rows, self.tail.quantised, *self.tail.scales}

    @cached_property
    def members(self) -> list[Node]:
        """From the ids to the rows, with what only they read, in graph order."""
        assert self.hashing is not None
        hashing, slots = self.hashing
        ahead = set(self.ahead)
        decoded, _ = cone(self.order, self.rows, self.takes, ahead.__contains__)
        nodes = {*hashing, *decoded, *self.takes, *self.tail.nodes}
        for take in self.takes:
            _, index = _taken(take)  # type: ignore[misc]
            nodes.update(cone(self.order, index, (self.modulo.args[0],), _may_index)[0])  # type: ignore[arg-type]
        return sorted(absorb({*nodes, slots} - {node for node in nodes if node.op != "call_function"}, _in_front),
                      key=self.order.__getitem__)  # fmt: skip

    def hangs_on_ids_alone(self, read: list[Node]) -> bool:
        """Whether all that `read` comes from are integers that the caller gives, and the tables. A table that the
        program made, or wrote before, hangs on what it was made of."""
        made = [node for node in self._held if node.op == "call_function" and not _views_a_table(node)]
        seen, stack = set[Node](), [*made, *(node for node in read if node not in self._held)]
        while stack:
            node = stack.pop()
            if node in seen or node.op == "get_attr":
                continue
            seen.add(node)
            value = fake(node)
            if node.is_impure() and node.op != "placeholder":
                return False
            if node.op == "placeholder" and value is not None and value.is_floating_point():
                return False
            stack += node.all_input_nodes
        return self.outermost

    def role(self, arg: Node) -> str:
        """What the look-up reads `arg` as."""
        value = fake(arg)
        if arg in self._held:
            return "table"
        return "ids" if value is not None and same_sizes(shape(arg)[:1], shape(self.modulo)[:1]) else "constant"

    @cached_property
    def _held(self) -> set[Node]:
        """The tables, however they are viewed."""
        held = set[Node]()
        for table in self.tables:
            while table not in held:
                held.add(table)
                if _views_a_table(table):
                    table = table.args[0]  # type: ignore[assignment]
        return held


def _views_a_table(node: Node) -> bool:
    return node.target in VIEWS or node.target is aten.view.dtype


def _may_hash(node: Node) -> bool:
    return node.target in VIEWS or is_part(node) or node.target in (
        aten.bitwise_xor.Tensor, aten.mul.Tensor, aten.cat.default, aten.clone.default)  # fmt: skip


def _may_index(node: Node) -> bool:
    return node.target in MODULO or node.target is aten.add.Tensor or is_pointwise(node) or node.target in VIEWS


def _in_front(node: Node) -> bool:
    """Whether `node` may come along from the ids: it works on integers, or views a table as bytes."""
    value = fake(node)
    whole = value is not None and (not value.is_floating_point())
    known = is_pointwise(node) or node.target in VIEWS or node.target in (aten.cumprod.default, aten.index.Tensor)
    return whole and (known or is_constant(node) or node.target in (aten.view.dtype, aten.cat.default))


def _taken(node: Node) -> tuple[Node, Node] | None:
    """The table that `node` takes rows of, and which; None where it does something else."""
    match node.target, node.args:
        case aten.embedding.default, (Node() as table, Node() as index, *_):
            return table, index
        case aten.index_select.default, (Node() as table, 0, Node() as index):
            return table, index
        case aten.index.Tensor, (Node() as table, [Node() as index]):
            return table, index
    return None


def lookups(order: Mapping[Node, int], outermost: bool) -> list[Lookup]:
    """Tables indexed with remainders of hashes, in graph order."""
    found: dict[Node, list[Node]] = {}
    if not any(node.target is aten.bitwise_xor.Tensor for node in order):
        return []
    for node in order:
        if (taken := _taken(node)) is not None:
            inside, _ = cone(order, taken[1], (), _may_index)
            rests = [each for each in inside if each.target in MODULO and _is_hash(order, each.args[0])]
            if len(rests) == 1:
                found.setdefault(rests[0], []).append(node)
    return [Lookup(order, outermost, modulo, tuple(takes)) for modulo, takes in found.items()]


def _is_hash(order: Mapping[Node, int], node: object) -> bool:
    nodes = cone(order, node, (), _may_hash)[0] if isinstance(node, Node) else []
    return any(each.target is aten.bitwise_xor.Tensor for each in nodes)
