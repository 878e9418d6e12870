"""nodes: nodes of a plan as values that outlive its graphs: what each calls, where it comes from and lies, its cost.

    add_41   body mhc_boundary_3   piece_16   aten.add.Tensor(mul_9, 1)  f32[u0, 4]   model_def/mhc.py:66  m = m / ...
    mm_4     body -                piece_17   aten.mm.default(view_8, permute_2)       read 512*u0 + 32768   flops ...

A body is told once, however many call it: a region's by the name of its submodule. Costs stand in the symbols of the
plan; those inside a region are none of their own, for a region counts as one kernel (analysis/cost.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from v41.passes.analysis.cost import Cost, Costs
from v41.passes.changes import ORIGIN, inner_name, own_lines, owner_in
from v41.plan import Plan
from v41.regions import body_of, invoke_subgraph, is_region, region_of
from v41.report import source_of

PRODUCTS, OTHERS = "products", "other nodes"  # what lies in no region


@dataclass(frozen=True)
class NodeFacts:
    """One node. `body` and `piece`: where it lies; "" for a body: in the piece itself."""

    name: str
    body: str
    piece: str  # the first that holds it
    text: str  # "aten.mul.Tensor(x, 2)  f32[u0, 4]"
    source: str  # its line of the model
    path: tuple[str, ...]  # lines of the model, the outermost call first
    module: str | None  # "layers.3.ffn", where tracing tells
    region: str | None  # name of the region that it is, or lies in
    origin: tuple[str, str]  # body and name as the passes left it, before shared bodies were opened and pieces cut
    attrs: dict[str, str] | None = None  # of a region: what its pass found it to be

    @property
    def identity(self) -> str:
        """What no other node is called: BODY/NAME, or /NAME in the program itself."""
        return f"{self.body}/{self.name}"


@dataclass(frozen=True)
class WorkFacts:
    """Work of one kind and size that a step does `count` times. read, written, flops and apart: formulas."""

    kind: str  # a region's name, PRODUCTS or OTHERS
    layer: int | None
    count: int
    launches: int  # of one: a region is one
    read: str
    written: str
    flops: str | None  # None where nobody knows
    unknown: tuple[str, ...]  # operators whose flops are left out
    apart: str  # bytes, both ways, if each of its nodes were a kernel
    parts: int  # launches, likewise
    kernel: bool  # whether what runs it is a kernel generated for its piece


def nodes_of(plan: Plan) -> list[NodeFacts]:
    """Every node of `plan` that calls something, in order; those of bodies behind their first call."""
    named: dict[int, str] = {}
    return [node for piece in plan.pieces for node in _nodes(piece.body, "", "", piece.name, None, named)]


def _nodes(
    gm: GraphModule, body: str, owner: str, piece: str, inside: str | None, named: dict[int, str]
) -> Iterator[NodeFacts]:
    """owner: as in changes.py, by which bodies are named there too. named: bodies told so far, by identity; of two
    pieces' bodies of one name the second is told as moe_gate_0~2."""
    texts = {name: text for name, (text, _) in own_lines(gm).items()}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.name not in texts:
            continue
        region, text, new = region_of(node).name if is_region(node) else inside, texts[node.name], False
        if node.target is invoke_subgraph:
            called, key = inner_name(node, owner), id(body_of(node))
            new = key not in named
            if new:
                twins = sum(name.partition("~")[0] == called for name in named.values())
                named[key] = f"{called}~{twins + 1}" if twins else called
            text = text.replace(f" {node.args[0].target}(", f" {named[key]}(", 1)
        path, origin = frames(node), node.meta.get(ORIGIN, (body, node.name))
        attrs = {name: str(value) for name, value in region_of(node).attrs.items()} if is_region(node) else None
        yield NodeFacts(node.name, body, piece, text, source_of(node), path, module_of(node), region, origin, attrs)
        if new:
            yield from _nodes(body_of(node), named[key], owner_in(node, owner), piece, region, named)


def frames(node: Node) -> tuple[str, ...]:
    """Lines of the user's code that led to `node`, the outermost call first."""
    found = re.findall(r'File "(.+?)", line (\d+), in .+\n(?:\s+(.+))?', node.meta.get("stack_trace") or "")
    return tuple(f"{'/'.join(path.split('/')[-2:])}:{line}  {code}".rstrip() for path, line, code in found)


def module_of(node: Node) -> str | None:
    """The innermost module that `node` was traced in, as its owner calls it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    told = str(list(stack.values())[-1][0]).removeprefix("L['self']")
    names = re.sub(r"\._modules(?=\[)", "", told)  # L['self']._modules['layers'] is layers
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", names).lstrip(".") or None


def work_of(plan: Plan, layers: Mapping[str, int | None], generated: Collection[str] = ()) -> list[WorkFacts]:
    """What a step of `plan` does, equal work together, in order. layers: piece -> the layer it belongs to. generated:
    pieces that run a generated kernel."""
    costs, found = Costs(), dict[WorkFacts, int]()
    for piece in plan.pieces:
        for node in _at_work(piece.body):
            fact = _work(node, costs, layers.get(piece.name), kernel=piece.name in generated)
            if fact is not None:
                found[fact] = found.get(fact, 0) + 1
    return [WorkFacts(**{**fact.__dict__, "count": count}) for fact, count in found.items()]


def _at_work(gm: GraphModule) -> Iterator[Node]:
    """Regions and single nodes, subgraphs that are no region opened."""
    for node in gm.graph.nodes:
        if node.target is invoke_subgraph and not is_region(node):
            yield from _at_work(body_of(node))
        elif node.op == "call_function":
            yield node


def _work(node: Node, costs: Costs, layer: int | None, *, kernel: bool) -> WorkFacts | None:
    cost: Cost = costs.node(node)
    if not cost.launches:
        return None
    product = getattr(node.target, "overloadpacket", None) in flop_registry or "_grouped_mm" in str(node.target)
    kind = region_of(node).name if is_region(node) else PRODUCTS if product else OTHERS
    apart = costs.parts(body_of(node)) if is_region(node) else cost
    flops = None if cost.flops is None else str(cost.flops)
    return WorkFacts(kind, layer, 1, cost.launches, str(cost.read), str(cost.written), flops, cost.unknown,
                     str(apart.moved), apart.launches, kernel)  # fmt: skip
