"""fuse_all_reduce: an all-reduce, and the boundary or norm that reads the sum, become one region.

    before   part -> all_reduce(sum, group) -> wait -> [casts, views, + residual] -> region(kind="mhc_boundary", ...)
    after    part -> region(kind="all_reduce_boundary", form="seam", group="0", ranks=4, reduce_op="sum",
                            dtype="bfloat16", part=0, reduced=(), producer="product", neighbour="mhc_boundary",
                            operands=("part", "comb", ...), outputs=("streams", "input", ...), ...) -> X', x, pre', ...

Site: every all-reduce. What reads the sum is a region already: an mHC boundary, post map or exit whose pending output
it is, or a norm with its tail, behind the sum with a residual perhaps (other models). Who else reads the sum gets it as
an output of the region, "reduced". Legal when all RULES hold; each is told from the graph, and a rank's graph differs
from another's in constants at most, so all ranks decide alike. Exact because outlining moves nodes and rewrites none:
the sum is rounded where the collective rounds it. The region is described in v41/regions.py.

Not fused: an average or a maximum, another reduction than that of a sum; sums that the model waits for later, since it
works meanwhile; a second group, as its ranks would wait for each other within a kernel in which others wait, too.
Needs outline_mhc; comes after outline_norm_quantise, and before writes are put in place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from v41._compat_groups import ranks_of
from v41.passes import spans
from v41.passes.analysis.effects import effect_of
from v41.passes.matching import RESHAPES, aten, fake, interface, prims, unviewed
from v41.passes.norms import role_of
from v41.passes.outline_norm_quantise import KIND as NORM
from v41.passes.reduced_parts import ALL_REDUCES, POST, Collective, is_idle, producer_of
from v41.passes.sites import Rule, outline_in_programs
from v41.regions import REDUCED, region_of
from v41.report import Decision

ADDED = (torch.bfloat16, torch.float16, torch.float32)  # of integers a rounded sum means nothing, of fp8 there is none
FORMS = {POST: "post", NORM: "norm"}  # of kinds that have one form


@dataclass(frozen=True)
class Site:
    """One all-reduce. first: that of its program; claims: a region that takes sums -> the last collective before it."""

    sum: Collective
    first: Collective
    claims: Mapping[Node, Node]
    kind = REDUCED

    @property
    def anchor(self) -> Node:
        return self.sum.begin

    @property
    def members(self) -> list[Node]:
        return self.sum.members

    @property
    def group(self) -> object:
        return self.sum.begin.args[2]


# ---- what must hold: each predicate returns the node at fault


def reduces_several(site: Site) -> Node | None:
    return site.anchor if fake(site.anchor) is None else None


def does_not_add(site: Site) -> Node | None:
    return None if site.anchor.args[1] == "sum" else site.anchor


def adds_other_numbers(site: Site) -> Node | None:
    value = fake(site.sum.part)
    return site.sum.part if value is None or value.dtype not in ADDED else None


def has_no_ranks(site: Site) -> Node | None:
    return site.anchor if (ranks_of(site.group) or 0) < 2 else None


def adds_up_over_another_group(site: Site) -> Node | None:
    return None if site.group == site.first.begin.args[2] else site.anchor


def is_read_before_its_wait(site: Site) -> Node | None:
    if site.sum.wait is not None:
        return None
    others = [user for user in site.anchor.users if "wait_tensor" not in str(user.target)]
    return next(iter([*others, *site.anchor.users]), site.anchor)


def works_meanwhile(site: Site) -> Node | None:
    assert site.sum.wait is not None  # the rule above
    between = spans.span([site.anchor, site.sum.wait])[1:-1]
    return next((node for node in between if not is_idle(node)), None)


def nothing_takes_it(site: Site) -> Node | None:
    if site.sum.neighbour is None:
        return next(iter(site.sum.wait.users), site.sum.wait)  # type: ignore[union-attr]
    return None


def is_not_the_last_sum(site: Site) -> Node | None:
    nearest = site.claims[site.sum.neighbour]  # type: ignore[index]
    return None if nearest is site.anchor else nearest


def reads_its_own_part(site: Site) -> Node | None:
    part = site.sum.part
    return next((node for node in site.members if node is not site.anchor and part in node.all_input_nodes), None)


def comes_back(site: Site) -> Node | None:
    return spans.comes_back(site.members)


def passes_an_effect(site: Site) -> Node | None:
    """An outsider with an effect, which would change places with the collective, or what writes in place."""
    inside = set(site.members)
    outsiders = (node for node in spans.span(site.members) if node not in inside)
    other = next((node for node in outsiders if effect_of(node) is not None or node.is_impure()), None)
    return other or spans.moves_an_effect(site.members)


RULES: tuple[Rule[Site], ...] = (  # in order: each may rely on those above
    ("one value is reduced at a time", reduces_several),
    ("what ranks have is added up", does_not_add),
    ("floats of 16 or 32 bits are added", adds_other_numbers),
    ("its group is known here, and has several ranks", has_no_ranks),
    ("all sums of a program are taken over one group", adds_up_over_another_group),
    ("the sum is waited for before anything reads it", is_read_before_its_wait),
    ("nothing is computed between the collective and its wait", works_meanwhile),
    ("an mHC boundary or a norm reads the sum, or the sum with a residual", nothing_takes_it),
    ("no other all-reduce stands nearer to what reads the sum", is_not_the_last_sum),
    ("a rank's own part is read by the collective alone", reads_its_own_part),
    ("nothing leaves the region and comes back", comes_back),
    ("no write, collective or draw stands between the collective and what reads the sum", passes_an_effect),
)


def fuse_all_reduce(gm: GraphModule) -> list[Decision]:
    """Outlines every legal site of `gm`, and of the subgraphs the model asked for, in place. One decision a site."""
    return outline_in_programs(gm, find_sites, lambda site: RULES, attributes)


def find_sites(gm: GraphModule) -> list[Site]:
    """Every all-reduce outside of regions, in graph order."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    sums = [Collective(order, node) for node in order if node.target in ALL_REDUCES]
    claims = {each.neighbour: each.begin for each in sums if each.neighbour is not None}
    return [Site(each, sums[0], claims) for each in sums]


def attributes(site: Site) -> dict[str, Any]:
    """What the region says of itself, read from the graph."""
    call, part = site.sum.neighbour, site.sum.part
    assert call is not None and site.sum.wait is not None
    neighbour = region_of(call)
    read, returned = interface(site.members)
    pairs = zip(call.args[2:], neighbour.attrs["operands"], strict=True)
    roles = {node: role for arg, role in pairs if isinstance(arg, Node) for node in unviewed(arg)} | {part: "part"}
    operands = tuple("part" if arg is part else _role(site, arg, roles) for arg in read)
    outputs = tuple(_made(site, node) for node in returned)
    late = {user for user in call.users if user.args[1] in neighbour.attrs.get("coefficients", ())}
    return {
        "form": FORMS.get(neighbour.kind) or neighbour.attrs["form"],
        "group": site.group,
        "ranks": ranks_of(site.group),
        "reduce_op": site.anchor.args[1],
        "dtype": str(fake(part).dtype).removeprefix("torch."),  # type: ignore[union-attr]
        "part": read.index(part),
        "operands": operands,
        "outputs": outputs,
        "reduced": tuple(i for i, role in enumerate(outputs) if role == "reduced"),
        "neighbour": neighbour.kind,
        "critical": tuple(i for i, node in enumerate(returned) if node not in late),
        "coefficients": tuple(i for i, node in enumerate(returned) if node in late),
        "producer": producer_of(part),
    }


def _role(site: Site, arg: Node, roles: Mapping[Node, str]) -> str:
    """What an operand is to the nested region; else what is added on the way."""
    role = role_of(arg, roles)
    adds = (node for node in site.members if node.target is aten.add.Tensor)
    added = {each for node in adds for other in node.all_input_nodes for each in unviewed(other)}
    return "residual" if role == "other" and arg in added else role


def _made(site: Site, node: Node) -> str:
    """What a member that others read is: an output of the nested region, the sum over ranks, or that with others."""
    call = site.sum.neighbour
    if node.target is operator.getitem and node.args[0] is call:
        return str(region_of(call).attrs["outputs"][node.args[1]])  # type: ignore[arg-type]
    while node.target in RESHAPES or node.target is prims.convert_element_type.default:
        node = node.args[0]  # type: ignore[assignment]
    return "reduced" if node is site.sum.wait else "sum"
