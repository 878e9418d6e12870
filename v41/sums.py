"""sums: who adds up over ranks: kernels on memory that the ranks share, or the library's collective.

    options={"all_reduce": "fused"}   before the first program that adds up over a group is compiled, its ranks vote,
                                      lay out memory and try it: a Workspace, from then on that of the group
    a rank that cannot                collectives stay as they are, on all ranks; the report says whose reason it was
    a program, compiled or loaded     each kernel that holds a sum gets the workspace of its group
    a call                            raises PeerStalled if a rank waited in vain, as far as the host has seen by then

The decision comes ahead of everything else, since what is compiled, and under which key it is kept, follows from it.
All ranks must reach it alike: it is read from the options, the device's type and the program, and else voted on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from v41._compat import outside_of_tracing
from v41._compat_groups import FAKE, backend_of, ranks_of
from v41._compat_symmetric import group_called
from v41.channels import Workspace
from v41.errors import NotSymmetric
from v41.options import Options
from v41.plan import Plan
from v41.runtime import symmetric
from v41.runtime.executor import Run

FUSED, LIBRARY = "fused", "library"
TRIAL = "sums over ranks"

# of groups that have voted, by device; they go with their group
_KNOWN: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Workspace | NotSymmetric]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Sums:
    """`how`: FUSED or LIBRARY. who: decided, and why. workspaces: by name of the group."""

    how: str
    who: str
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)

    def bind(self, artifacts: Iterable[Any]) -> list[Workspace]:
        """Gives each artifact that adds up over a group the memory of that group. What was given, each once."""
        summing = [made for made in artifacts if getattr(made, "group", None) is not None]
        for made in summing:
            made.kernel.bind(self.workspaces[made.group])
        return [self.workspaces[group] for group in dict.fromkeys(made.group for made in summing)]


def decided(gm: GraphModule, options: Options, device: torch.device, codegen: Callable[[], str]) -> Sums:
    """Who adds up in Dynamo's graph `gm`. codegen: the effective one. Collective where options ask for kernels."""
    who = "auto" if options.all_reduce == "auto" else "options"
    if options.all_reduce == LIBRARY:
        return Sums(LIBRARY, who)
    groups = groups_of(gm)
    if not groups:
        return Sums(LIBRARY, who)
    if any(backend_of(group) == FAKE for group in groups):
        return Sums(LIBRARY, f"{who}: the other ranks of a fake group do not exist")
    if codegen() != "triton":
        return Sums(LIBRARY, f"{who}: no kernel adds up over ranks with codegen {codegen()}")
    try:
        with outside_of_tracing():
            return Sums(FUSED, who, {group: shared(group, device) for group in groups})
    except NotSymmetric as error:
        return Sums(LIBRARY, f"{who}: {error.facts['reason']}")


def groups_of(gm: GraphModule) -> list[str]:
    """Names of the groups over which `gm`, and the subgraphs it calls, reduce something, in order of first use."""
    nodes = (node for each in gm.modules() if isinstance(each, GraphModule) for node in each.graph.nodes)
    calls = (node for node in nodes if node.op == "call_function" and "all_reduce" in str(node.target))
    told = (arg for call in calls for arg in (*call.args, *call.kwargs.values()))
    return [arg for arg in dict.fromkeys(arg for arg in told if isinstance(arg, str)) if (ranks_of(arg) or 0) > 1]


def shared(group: str, device: torch.device) -> Workspace:
    """The memory that `group` shares, tried; made when first asked for. NotSymmetric, every time, if there is none."""
    from v41.lowering.templates.all_reduce.trial import trial

    process_group = group_called(group)
    known = _KNOWN.setdefault(process_group, {})
    found = known.get(device)
    if found is None:
        try:
            found = symmetric.workspace(process_group, device)
            symmetric.trusted(found, process_group, TRIAL, trial)
        except NotSymmetric as error:
            found = error
        known[device] = found
    if isinstance(found, NotSymmetric):
        raise found
    return found


def told(plan: Plan, artifacts: Mapping[str, Any]) -> str | None:
    """How many sums of `plan` are in kernels and how many are not; None where there are none."""
    everything = sum(line.startswith("all_reduce") for line in plan.collectives)
    fused = sum(getattr(artifacts[piece.key], "group", None) is not None for piece in plan.pieces)
    if not everything:
        return None
    rest = f"{everything - fused} as they are, each in front of what reads the sum"
    return rest if not fused else f"{fused} in kernels" + (f", {rest}" if everything > fused else "")


class Checked:
    """The boxed function `run`; each call of it raises PeerStalled where a rank of `workspaces` has waited in vain."""

    _boxed_call = True

    def __init__(self, run: Run, workspaces: Iterable[Workspace]) -> None:
        self.run, self.workspaces = run, tuple(workspaces)

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        results = self.run(inputs)
        for each in self.workspaces:
            each.check()
        return results
