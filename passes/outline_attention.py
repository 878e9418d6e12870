"""outline_attention: RoPE of the queries, attention over packed keys and the turn back become one region.

    before   q -> RoPE;  records -> decode -> keys;  p = exp(scale q.keys - max);  round(p).keys / total -> RoPE -> o
    after    region(kind="attention", heads=64, width=512, window=128, picked=512, scale=0.0441942, rope={...},
                    turns=(1, -1), keys=(("e4m3", "ue8m0", 32, 528), ("e2m1", "e4m3", 16, 288)), p="bfloat16",
                    p_over="max", sink=True, operands=("queries", "cos", ...), outputs=("output",), ...) -> o

Site: a softmax between two batched products, the one that makes scores and the one that reads values. Legal when all
RULES hold. What it computes is read by running it on numbers (analysis/probe.py), so masks, sink, scale and the form of
the softmax may be spelled in any way; what is rounded, and where, is read from its casts. Decoding (records.py) and
RoPE (turns.py) come in where they are; else the region begins at keys, or queries, as they are.
Exact because outlining moves nodes and rewrites none; convex, as only the output is read outside. In a subgraph
that layers share it is outlined there, once. Needs canonicalize.

Keys are values here, one latent for all heads: attention with values of its own is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.passes.attention_core import Core, Meaning, find_cores, meaning_of
from v41.passes.matching import (
    RESHAPES,
    VIEWS,
    absorb,
    aten,
    fake,
    interface,
    is_constant,
    is_narrowing,
    is_widening,
    shape,
    unviewed,
)
from v41.passes.records import Record, record_of
from v41.passes.sites import STAYS, Rule, is_read_inside, outline_in_programs
from v41.passes.turns import Rotation, rotation_from, rotation_to, rounds_early
from v41.report import Decision

KIND = "attention"


@dataclass(frozen=True)
class Site:
    """One core, and what of RoPE and decoding is around it."""

    core: Core
    kind = KIND

    @property
    def anchor(self) -> Node:
        return self.core.soft

    @cached_property
    def meaning(self) -> Meaning | None:
        return meaning_of(self.core)

    @property
    def width(self) -> int:
        return int(self.core.sizes[1])  # type: ignore[call-overload]

    @cached_property
    def records(self) -> list[Record | None]:
        """How each branch of keys is packed; None where it comes as it is."""
        return [record_of(self.core.order, branch) for branch in self.core.branches]

    @cached_property
    def turn(self) -> Rotation | None:
        return rotation_to(self.core.order, self.core.queries, self.width)

    @cached_property
    def turn_back(self) -> Rotation | None:
        return rotation_from(self.core.order, self.core.result, self.width)

    @property
    def turns(self) -> list[Rotation]:
        return [turn for turn in (self.turn, self.turn_back) if turn is not None]

    @property
    def result(self) -> Node:
        return self.turn_back.result if self.turn_back is not None else self.core.result

    @cached_property
    def members(self) -> list[Node]:
        """All nodes, in graph order."""
        parts = [part.nodes for part in (*self.turns, *self.records) if part is not None]
        nodes = absorb({node for part in (self.core.nodes, *parts) for node in part}, _is_free)
        return self._without_shared_views(sorted(nodes, key=self.core.order.__getitem__))

    def _without_shared_views(self, nodes: list[Node]) -> list[Node]:
        """Views of an operand and constants that others read as well stay outside."""
        inside = set(nodes)
        for node in nodes:
            shared = node is not self.result and not inside.issuperset(node.users)
            if shared and _is_free(node) and inside.isdisjoint(node.all_input_nodes):
                inside.remove(node)
        return [node for node in nodes if node in inside]

    @cached_property
    def roles(self) -> dict[Node, str]:
        """What it reads, by name."""
        assert self.meaning is not None
        found = {self.turn.source if self.turn is not None else self.core.queries: "queries"}
        for branch, record, name in zip(self.core.branches, self.records, ("window", "picked"), strict=False):
            found[branch if record is None else record.packed] = name
        found |= self.meaning.masks
        found |= {sink: "sink" for sink in self.core.others}
        for turn in self.turns:
            found |= {turn.cos: "cos", turn.sin: "sin"}
        return found


def _is_free(node: Node) -> bool:
    return node.target in RESHAPES or is_widening(node) or is_constant(node)


# ---- what must hold: each predicate returns the node at fault


def has_values_of_its_own(site: Site) -> Node | None:
    return None if site.core.latent is not None else site.core.pv


def counts_by_symbols(site: Site) -> Node | None:
    sizes = [*site.core.sizes, *(size for branch in site.core.branches for size in shape(branch)[1:2])]
    return None if all(isinstance(size, int) for size in sizes) else site.core.qk


def reads_more(site: Site) -> Node | None:
    """Two branches at most, a mask for each, and one number a head."""
    core, heads = site.core, site.core.sizes[0]
    if len(core.branches) > 2 or len(core.others) > 1:
        return [*core.branches, *core.others][-1]
    odd = (node for node in core.others if not known_equal(fake(node).numel(), heads))  # type: ignore[union-attr, arg-type]
    return next(odd, None if len(core.masks) == len(core.branches) else core.soft)


def rounds_elsewhere(site: Site) -> Node | None:
    core = site.core
    for node in core.nodes:
        value = fake(node)
        if value is None or not value.is_floating_point() or node is core.result:
            continue
        if is_narrowing(node) and not _leads_to(node, core.pv):
            return node
        computes = node.target not in EXACT and not is_constant(node) and not _is_cast(node)
        if computes and node.target not in VIEWS and value.dtype.itemsize < 4:
            return node
    *_, p = unviewed(core.probabilities)
    before = list(unviewed(p.args[0]))[-1] if is_narrowing(p) else p  # type: ignore[arg-type]
    return before if is_narrowing(before) and before is not p else None  # it is rounded twice


EXACT = (aten.where.self, aten.cat.default, aten.clone.default)


def _is_cast(node: Node) -> bool:
    return is_narrowing(node) or is_widening(node)


def _leads_to(node: Node, reader: Node) -> bool:
    """Whether all that reads `node`, up to views and casts, is `reader`."""
    users = (user for user in node.users if user is not reader)
    return all((user.target in VIEWS or _is_cast(user)) and _leads_to(user, reader) for user in users)


def attends_otherwise(site: Site) -> Node | None:
    return None if site.meaning is not None else site.core.soft


def turns_otherwise(site: Site) -> Node | None:
    if len(site.turns) < 2:
        return None
    there, back = site.turns
    return None if there.tables == back.tables and there.form == back.form else back.result


def rounds_turning(site: Site) -> Node | None:
    return next((node for turn in site.turns if (node := rounds_early(turn)) is not None), None)


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("the keys are the values, one latent for all heads", has_values_of_its_own),
    ("all sizes but that of the rows are numbers", counts_by_symbols),
    ("it reads queries, one or two branches of keys with a mask each, and a sink", reads_more),
    ("scores and sums are fp32, and p is rounded for the values alone", rounds_elsewhere),
    ("it is a softmax of scaled scores, hidden keys left out, a sink in the total", attends_otherwise),
    ("the output turns back by what turned the queries", turns_otherwise),
    ("RoPE is fp32, rounded once", rounds_turning),
    ("only its output is read outside", lambda site: is_read_inside(site.members, [site.result])),
    STAYS,
)


def outline_attention(gm: GraphModule) -> list[Decision]:
    """Outlines every legal site of `gm`, and of the subgraphs the model asked for, in place. One decision a site."""
    return outline_in_programs(gm, find_sites, lambda site: RULES, attributes)


def find_sites(gm: GraphModule) -> list[Site]:
    """Softmaxes between two products, in graph order."""
    return [Site(core) for core in find_cores(gm)]


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    core, meaning = site.core, site.meaning
    assert meaning is not None
    heads, width, _ = core.sizes
    window, picked, *_ = [*(shape(branch)[1] for branch in core.branches), None]
    rope = None
    if site.turns:
        rope = dict(zip(("width", "pairs", "channels"), site.turns[0].form, strict=True))
    seen = {list(unviewed(node))[-1]: role for node, role in site.roles.items()}
    read, _ = interface(site.members)
    names = (seen.get(list(unviewed(arg))[-1], "size" if fake(arg) is None else "constant") for arg in read)
    return {
        "heads": heads,
        "width": width,
        "window": window,
        "picked": picked,  # None: no second branch
        "scale": meaning.scale,
        "rope": rope,  # None: neither queries nor output are turned
        "turns": tuple(0 if turn is None else turn.sign for turn in (site.turn, site.turn_back)),
        "keys": tuple("as_is" if record is None else record.format for record in site.records),
        "sources": ("rows",) * len(site.records),  # see take_in_gathers
        "masks": tuple(meaning.masks.values()),
        "p": str(list(unviewed(core.probabilities))[-1].meta["val"].dtype).removeprefix("torch."),
        "p_over": meaning.over,
        "sink": bool(core.others),
        "empty": meaning.empty,
        "reads_hidden": meaning.reads_hidden,
        "operands": tuple(names),
        "outputs": ("output",),
    }
