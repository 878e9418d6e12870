"""reduced_parts: what stands around an all-reduce in a canonical graph. Found, not judged.

    producer -> part -> all_reduce -> wait_tensor -> casts, views, sums with others -> a region that reads rows whole

`Collective` is one all-reduce, its neighbour the first region behind it that takes the sum for what it mixes in or
norms. What makes the part is looked for in bodies too: of regions, and of subgraphs that layers share.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, ops
from torch.fx import Node

from v41.passes.matching import RESHAPES, VIEWS, absorb, aten, between, prims
from v41.passes.mhc_predictions import BOUNDARY, EXIT, POST
from v41.passes.norms import is_free
from v41.passes.outline_experts import KIND as EXPERTS
from v41.passes.outline_norm_quantise import KIND as NORM
from v41.regions import body_of, invoke_subgraph, is_region, region_of

c10d = ops._c10d_functional
ALL_REDUCES = (c10d.all_reduce.default, c10d.all_reduce_coalesced.default)
TAKES_SUM = {BOUNDARY: "pending", POST: "pending", EXIT: "pending", NORM: "input"}  # kind -> the operand that it is
# On the way there. Not here: products (the sum is scaled, or projected), slices and gathers (rows go missing).
ON_THE_WAY = (*RESHAPES, prims.convert_element_type.default, aten.add.Tensor)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default)


@dataclass(frozen=True)
class Collective:
    """order: place of each node of its program."""

    order: Mapping[Node, int]
    begin: Node

    @property
    def part(self) -> Node:
        """What this rank hands in."""
        return self.begin.args[0]  # type: ignore[return-value]

    @cached_property
    def wait(self) -> Node | None:
        """Its wait, where nothing else reads what is under way."""
        users = list(self.begin.users)
        return users[0] if len(users) == 1 and users[0].target is c10d.wait_tensor.default else None

    @cached_property
    def neighbour(self) -> Node | None:
        """The call of the first region that takes the sum, in graph order; None where none does."""
        return min(self._behind(), key=self.order.__getitem__, default=None)

    @cached_property
    def members(self) -> list[Node]:
        """Collective, wait, what is on the way to the neighbour, and the neighbour; in graph order."""
        assert self.wait is not None and self.neighbour is not None
        call, taken = self.neighbour, takes_sum(self.neighbour)
        inside = {self.begin, self.wait, *between(self.order, {self.wait}, [taken], (), is_on_the_way)}  # type: ignore[list-item]
        inside = absorb(inside, lambda node: node is not self.part and is_free(node))
        inside |= {call, call.args[0], *(user for user in call.users if user.target is operator.getitem)}  # type: ignore[arg-type]
        return sorted(inside, key=self.order.__getitem__)

    def _behind(self) -> list[Node]:
        """The regions that read the sum, or what it becomes on the way."""
        found: dict[Node, None] = {}
        seen: dict[Node, None] = {}
        queue = deque([self.wait] if self.wait is not None else [])
        while queue:
            node = queue.popleft()
            seen[node] = None
            for user in node.users:
                if is_region(user) and takes_sum(user) is node:
                    found[user] = None
                elif user not in seen and is_on_the_way(user):
                    queue.append(user)
        return list(found)


def takes_sum(call: Node) -> Node | None:
    """The operand of a region that may be a sum over ranks; None for regions of other kinds."""
    if not is_region(call) or region_of(call).kind not in TAKES_SUM:
        return None
    region = region_of(call)
    wanted, operands = TAKES_SUM[region.kind], region.attrs["operands"]
    return call.args[2 + operands.index(wanted)] if wanted in operands else None


def is_idle(node: Node) -> bool:
    """Whether nothing is computed: a view, a size, a reference to a body."""
    return node.op != "call_function" or node.target in VIEWS or not _tensors(node)


def _tensors(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (Tensor, tuple, list)) or node.is_impure()


def is_on_the_way(node: Node) -> bool:
    """A view, a cast, or a plain sum of two tensors."""
    return node.target in ON_THE_WAY and not (node.target is aten.add.Tensor and (node.kwargs or _adds_a_number(node)))


def _adds_a_number(node: Node) -> bool:
    return not all(isinstance(arg, Node) for arg in node.args)


# ---- what makes the part


def producer_of(part: Node) -> str | None:
    """ "product" for a GEMM, "combine" for the outputs of experts added up, where nothing but the collective reads it;
    else None."""
    node, alone = part, len(part.users) == 1
    while alone:
        if node.target is operator.getitem and node.args[0].target is invoke_subgraph:  # type: ignore[union-attr]
            call: Node = node.args[0]  # type: ignore[assignment]
            if is_region(call, EXPERTS):
                return "combine"
            node = body_of(call).graph.output_node().args[0][node.args[1]]  # type: ignore[index, assignment]
        elif node.target in PRODUCTS:
            return "product"
        elif node.target is aten.add.Tensor:
            return "combine" if any(map(comes_of_experts, node.all_input_nodes)) else None
        elif node.target in RESHAPES or node.target is prims.convert_element_type.default:
            node = node.args[0]  # type: ignore[assignment]
        else:
            return None
        alone = len(node.users) == 1
    return None


def comes_of_experts(node: Node) -> bool:
    """Whether `node` is what experts return, up to views and casts."""
    while node.target in RESHAPES or node.target is prims.convert_element_type.default:
        node = node.args[0]  # type: ignore[assignment]
    return node.target is operator.getitem and is_region(node.args[0], EXPERTS)  # type: ignore[arg-type]
