"""drop_lone_collectives: what a group of one rank sums, averages or gathers is what that rank has.

    before   x -> all_reduce(sum, a group of one) -> wait_tensor -> y
    after    x -> clone -> y

Site: an all-reduce, all-gather or reduce-scatter over one rank. Exact: there each of them copies its input. The copy
stays, since the caller may return both; canonicalize takes it where nobody could tell. The effect goes, which is this
pass's business to break: such a collective talks to nobody, so it keeps no order.
"""

from __future__ import annotations

from torch import ops
from torch.fx import GraphModule, Node

from v41._compat_groups import ranks_of
from v41.passes.canonicalize import spell_arguments
from v41.passes.matching import aten
from v41.passes.sites import Rule, broken_rule, in_programs
from v41.report import Decision, applied, refused

c10d = ops._c10d_functional
GROUP_AT = {  # operator -> which argument names the group
    c10d.all_reduce.default: 2,
    c10d.all_gather_into_tensor.default: 2,
    c10d.reduce_scatter_tensor.default: 3,
}
OF_ONE = ("sum", "avg", "min", "max", "product")  # a number reduced alone stays; scaled sums are not among them


def changes_a_number(begin: Node) -> Node | None:
    gathers = begin.target is c10d.all_gather_into_tensor.default
    return None if gathers or begin.args[1] in OF_ONE else begin


RULES: tuple[Rule[Node], ...] = (("one number reduced is that number", changes_a_number),)


def drop_lone_collectives(gm: GraphModule) -> list[Decision]:
    """Replaces such collectives and their waits, in place, in `gm` and the subgraphs the model asked for."""
    return in_programs(gm, _drop)


def _drop(gm: GraphModule) -> list[Decision]:
    judged = [(site, broken_rule(site, RULES)) for site in find_sites(gm)]
    return [refused(site, *broken) if broken is not None else applied(_dropped(site)) for site, broken in judged]


def find_sites(gm: GraphModule) -> list[Node]:
    """Collectives over a group of one, in graph order."""
    begun = [node for node in gm.graph.nodes if node.target in GROUP_AT]
    for node in begun:
        spell_arguments(node)
    return [node for node in begun if ranks_of(node.args[GROUP_AT[node.target]]) == 1]


def _dropped(begin: Node) -> Node:
    begin.target, begin.args, begin.kwargs = aten.clone.default, begin.args[:1], {}
    for user in list(begin.users):
        if user.target is c10d.wait_tensor.default:
            user.replace_all_uses_with(begin)
            begin.graph.erase_node(user)
    return begin
