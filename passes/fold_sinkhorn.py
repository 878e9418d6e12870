"""fold_sinkhorn: an unrolled Sinkhorn loop becomes one region that knows how many steps it takes.

    before   m0 -> [sum(axis, keepdim), add eps, div] -> m1 -> [the same over the other axis] -> m2 ... -> m39
    after    m0 -> region(kind="sinkhorn", first_axis=-2, steps=39, eps=1e-6, body=those nodes) -> m39

Site: a run of two or more steps m / (m.sum(axis, keepdim=True) + eps); a lone one (top-k weights) is none. A step may
multiply by the reciprocal, leave eps out, or see the matrix transposed: the body keeps the spelling, the attributes the
meaning. What comes before the first step (a softmax, which is the first row step, and its eps) stays outside.
Legal when all RULES hold. Exact because outlining moves the matched nodes, in order, and rewrites none.

A loop inside a subgraph that the model itself asked for (nested_compile_region) is folded there once; then the calls of
that subgraph are inlined, since what is left around the loop is small and belongs to its surroundings: a decision each.

Needs canonicalize. mHC eq. 19 (arXiv:2512.24880); DeepSeek-V4.1-Flash takes 39 steps, columns first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.passes.matching import RESHAPES, aten, programs, same_sizes, same_view, shape
from v41.passes.sites import broken_rule, in_programs
from v41.regions import body_of, inline, invoke_subgraph, is_region, outline, regions
from v41.report import Decision, applied, refused

KIND = "sinkhorn"


@dataclass(frozen=True)
class Step:
    """One normalisation. `axis` counts from the end, in the matrix as the first step of the chain sees it."""

    source: Node  # m, [..., n, n], as this step reads it
    nodes: tuple[Node, ...]  # in graph order; the last is the result
    axis: int  # -1 normalises rows, -2 columns
    eps: float
    reciprocal: bool = False  # m * (1 / sum): other bits than m / sum
    transposed: bool = False  # sees the matrix of the first step transposed

    @property
    def axis_of_first(self) -> int:
        return -3 - self.axis if self.transposed and self.axis in (-1, -2) else self.axis


def match_step(result: Node) -> Step | None:
    """The step that ends in `result`, or None. A keyword (alpha=, dtype=) would change the sum, so it is no match."""
    if result.kwargs or len(result.args) != 2:
        return None
    pairs = {aten.div.Tensor: [result.args], aten.mul.Tensor: [result.args, result.args[::-1]]}
    for m, divisor in pairs.get(result.target, []):  # type: ignore[call-overload]
        if isinstance(m, Node) and isinstance(divisor, Node):
            step = _match_divisor(m, divisor, result)
            if step is not None:
                return step
    return None


def _match_divisor(m: Node, divisor: Node, result: Node) -> Step | None:
    """Reads the divisor backwards: views, at most one added number, one sum of `m`; for a mul, one reciprocal."""
    nodes, eps, inverted, node = [result], None, False, divisor
    while node.target is not aten.sum.dim_IntList:
        nodes.append(node)
        match node.target, node.args:
            case aten.add.Tensor, (Node() as inner, int() | float() as number) if eps is None and not node.kwargs:
                eps = float(number)
            case aten.reciprocal.default, (Node() as inner,) if eps is None and not inverted:
                inverted = True
            case _ if node.target in RESHAPES:
                inner = node.args[0]  # type: ignore[assignment]
            case _:
                return None
        node = inner
    if inverted is not (result.target is aten.mul.Tensor) or not same_view(node.args[0], m) or node.kwargs:
        return None
    axes, full = node.args[1], list(shape(m))
    if not isinstance(axes, list) or len(axes) != 1 or not full:
        return None
    axis = axes[0] % len(full)
    if not same_sizes(shape(divisor), (*full[:axis], 1, *full[axis + 1 :])):
        return None
    return Step(m, (node, *reversed(nodes)), axis - len(full), eps or 0.0, inverted)


def find_chains(gm: GraphModule, least: int = 2) -> list[list[Step]]:
    """Longest runs of at least `least` steps, each reading the result of the one before, in graph order."""
    chains: dict[Node, list[Step]] = {}  # keyed by the result so far
    for step in filter(None, map(match_step, gm.graph.nodes)):
        before, turn = step.source, cast(tuple[Node, ...], ())
        if before not in chains and _transposes(before):
            again = step.nodes[0].args[0]  # the sum may read a view of its own
            turn = (before,) if again is before else (before, cast(Node, again))
            before = before.args[0]  # type: ignore[assignment]
        chain = chains.pop(before, [])
        if chain:
            flipped = chain[-1].transposed is not bool(turn)
            step = Step(step.source, (*turn, *step.nodes), step.axis, step.eps, step.reciprocal, flipped)
        chains[step.nodes[-1]] = [*chain, step]
    return [chain for chain in chains.values() if len(chain) >= least]


def _transposes(node: Node) -> bool:
    """Whether `node` swaps the last two axes and leaves the others."""
    if node.target is not aten.permute.default:
        return False
    order = [axis % len(shape(node)) for axis in node.args[1]]  # type: ignore[union-attr, operator]
    last = len(order) - 1
    return len(order) > 1 and order == [*range(last - 1), last, last - 1]


def repeats_or_leaves_the_axes(chain: list[Step]) -> Node | None:
    return next((b.nodes[-1] for a, b in pairwise(chain) if {a.axis_of_first, b.axis_of_first} != {-1, -2}), None)


def is_not_square(chain: list[Step]) -> Node | None:
    return None if known_equal(*shape(chain[0].source)[-2:]) else chain[0].source


def changes_eps(chain: list[Step]) -> Node | None:
    return next((step.nodes[-1] for step in chain if step.eps != chain[0].eps), None)


def changes_division(chain: list[Step]) -> Node | None:
    return next((step.nodes[-1] for step in chain if step.reciprocal is not chain[0].reciprocal), None)


def is_read_outside(chain: list[Step]) -> Node | None:
    nodes = [node for step in chain for node in step.nodes]
    inside = set(nodes)
    return next((node for node in nodes[:-1] if any(user not in inside for user in node.users)), None)


RULES = (  # what must hold, and who finds the node that breaks it; in order: each may rely on those above
    ("alternates between the last two axes", repeats_or_leaves_the_axes),
    ("works on square matrices", is_not_square),
    ("keeps one eps", changes_eps),
    ("divides the same way in every step", changes_division),
    ("is read outside at its end only", is_read_outside),
)


def fold_sinkhorn(gm: GraphModule) -> list[Decision]:
    """Outlines every legal chain of `gm` in place. One decision a chain, in graph order."""
    for subgraph in programs(gm)[:-1]:
        _fold(subgraph)
    folded = [applied(call) for call in _inline_holders(gm)]
    judged = in_programs(gm, _fold)
    inner, own = ([each for each in judged if bool(each.body) is inside] for inside in (True, False))
    order = {node.name: i for i, node in enumerate(gm.graph.nodes)}
    return inner + sorted(folded + own, key=lambda decision: order.get(decision.node, -1))


def _inline_holders(gm: GraphModule) -> list[Node]:
    """Inlines calls of subgraphs, not regions, that hold a loop or a lone step of one. The regions `gm` got by it."""
    before = set(regions(gm, KIND))
    for program in programs(gm):
        for call in [node for node in program.graph.nodes if node.target is invoke_subgraph and not is_region(node)]:
            if _holds_a_loop(body_of(call)):
                inline(program, call)
    return [call for call in regions(gm, KIND) if call not in before]


def _holds_a_loop(body: GraphModule) -> bool:
    steps = [chain[0].source for chain in find_chains(body, least=1)]
    square = any(len(shape(m)) > 2 and known_equal(*shape(m)[-2:]) for m in steps)
    return square or next(regions(body, KIND), None) is not None


def _fold(gm: GraphModule) -> list[Decision]:
    decisions = []
    for chain in find_chains(gm):
        nodes = [node for step in chain for node in step.nodes]
        broken = broken_rule(chain, RULES)
        if broken:
            decisions.append(refused(nodes[-1], *broken))
            continue
        first = chain[0]
        call = outline(gm, nodes, kind=KIND, first_axis=first.axis, steps=len(chain), eps=first.eps)
        decisions.append(applied(call))
    return decisions
