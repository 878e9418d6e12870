"""Sites that lie in each other are outlined as they were described: operands in the order in which they were read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from tests.invariants import check_same_values, copy_program
from tests.strategies.tracing import trace
from v41.passes.matching import interface
from v41.passes.sites import outline_sites
from v41.regions import region_of, regions


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
