"""Sites that lie in each other are outlined as they were described: operands in the order in which they were read.
Sites of one name in several bodies are told apart, by names of the bodies that everything else has for them, too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import nested_compile_region
from torch.fx import GraphModule, Node

from tests.invariants import check_same_values, copy_program
from tests.strategies.tracing import trace
from v41.passes.changes import bodies
from v41.passes.matching import interface, named_programs, programs
from v41.passes.sites import in_programs, outline_sites
from v41.regions import outline, region_of, regions
from v41.report import Decision, applied


@dataclass(frozen=True)
class Site:
    kind: str
    members: list[Node]

    @property
    def anchor(self) -> Node:
        return self.members[-1]


def crossed(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """The sum reads exp, so it moves behind the region of exp and cos: then sin is the first of the other's nodes."""
    early = x.exp()
    total = early + y
    wave = z.sin()
    return total * wave - x.cos()


def test_operands_and_outputs_of_crossed_sites_are_those_described() -> None:
    gm = trace(crossed, *(torch.randn(3, 4) for _ in range(3)))
    before = copy_program(gm)
    by_name = {str(node.target).removeprefix("aten.").split(".")[0]: node for node in gm.graph.nodes}
    sites = [Site("first", [by_name["exp"], by_name["cos"]]),
             Site("second", [by_name["add"], by_name["sin"], by_name["mul"]])]  # fmt: skip
    y, z = list(gm.graph.find_nodes(op="placeholder"))[-2:]
    roles = {by_name["exp"]: "early", y: "added", z: "angle", **{node: "x" for node in by_name["exp"].all_input_nodes}}

    def attributes(site: Site) -> dict[str, object]:
        return {"operands": tuple(roles[node] for node in interface(site.members)[0])}

    decisions = outline_sites(gm, sites, lambda site: (), attributes)
    gm.recompile()
    assert all(decision.applied for decision in decisions)
    (call,) = (call for call in regions(gm) if region_of(call).kind == "second")
    given = dict(zip(region_of(call).attrs["operands"], call.args[2:], strict=True))
    assert list(given) == ["early", "added", "angle"] and (given["added"], given["angle"]) == (y, z)
    check_same_values(before, gm, rows=3)


@nested_compile_region
def inner(x: Tensor) -> Tensor:
    return x.tanh() * 2


@nested_compile_region
def outer(x: Tensor) -> Tensor:
    return inner(inner(x.exp())).tanh()


def nested(x: Tensor) -> Tensor:
    return outer(outer(x)).tanh()  # a body called once would be inlined by AOTAutograd


def test_a_site_is_named_by_its_body_as_changes_name_it() -> None:
    gm = trace(nested, torch.randn(3, 4))

    def judge(program: GraphModule) -> list[Decision]:
        found = program.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
        return [applied(outline(program, [node], kind="tanh")) for node in found]

    told = named_programs(gm)
    assert list(told) == programs(gm) and len(told) == 3 == len(set(told.values())) and told[gm] == ""
    decisions = in_programs(gm, judge)
    assert [each.body for each in decisions] == list(told.values())  # innermost first, one site in each
    assert any(name.count("/") == 1 for name in told.values())  # what a body calls is named by that
    assert [each.name for each in decisions] == [f"{each.body}/{each.node}".lstrip("/") for each in decisions]
    assert len({each.node for each in decisions}) < len({each.name for each in decisions}) == 3
    assert told.items() <= {body: name for name, body in bodies(gm)}.items()
