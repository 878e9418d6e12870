"""matching: questions that several passes ask of a canonical ATen graph. Nothing here judges or edits.

A value is *the same up to views and widening casts* when only its shape, strides or a wider dtype stand between: those
are free to move into the region that reads it. A narrowing cast is a rounding point: it belongs to what it rounds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import SymInt, Tensor, ops
from torch.fx import GraphModule, Node

from v41._compat import OpOverload, known_equal
from v41.regions import META

aten, prims = ops.aten, ops.prims

# Results that are their first argument's memory, looked at in another way. Not here: `as_strided` (it may overlap),
# `view.dtype` (it reads bits, not values), and what copies at will (`reshape`, `contiguous`).
VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.alias.default,
        aten.detach.default,
        aten.slice.Tensor,
        aten.select.int,
    }
)
# Views that neither drop nor repeat an element.
RESHAPES = VIEWS - {aten.expand.default, aten.slice.Tensor, aten.select.int}

SPLITS = frozenset({aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int})


def programs(gm: GraphModule) -> list[GraphModule]:
    """`gm` and, once each, the subgraphs the model itself asked for, innermost first. Bodies of regions are closed."""
    return list(named_programs(gm))


def named_programs(gm: GraphModule) -> dict[GraphModule, str]:
    """The same, each with the name that `changes.bodies` has for it: "" is `gm`, "outer/inner" what "outer" calls."""
    found: dict[GraphModule, str] = {}

    def visit(program: GraphModule, name: str) -> None:
        for node in program.graph.nodes:
            if node.op == "get_attr":
                body = getattr(program, str(node.target), None)
                if isinstance(body, GraphModule) and body not in found and META not in body.meta:
                    visit(body, f"{name}/{node.target}" if name else str(node.target))
        found[program] = name

    visit(gm, "")
    return found


def fake(node: object) -> Tensor | None:
    """The fake tensor `node` stands for; None for a number, a size or a tuple."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def shape(node: Node) -> tuple[int | SymInt, ...]:
    """The shape of the tensor `node` stands for, () for what is no tensor."""
    value = fake(node)
    return () if value is None else tuple(value.shape)


def same_sizes(a: tuple[int | SymInt, ...], b: tuple[int | SymInt, ...]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(x is y or known_equal(x, y) for x, y in zip(a, b, strict=True))


def is_widening(node: Node) -> bool:
    """Whether `node` is a cast that keeps every value of its input, e.g. bf16 to fp32."""
    if node.target is not prims.convert_element_type.default:
        return False
    source, target = fake(node.args[0]), node.args[1]
    if source is None or not isinstance(target, torch.dtype):
        return False
    small = [dtype.is_floating_point and dtype.itemsize == 1 for dtype in (source.dtype, target)]
    if any(small):  # fp8 has no promotion; bf16 holds every value of every one of them
        return source.dtype is target or (not small[1] and target in (torch.bfloat16, torch.float32, torch.float64))
    return torch.promote_types(source.dtype, target) is target


def is_narrowing(node: Node) -> bool:
    """Whether `node` is a cast that may round."""
    return node.target is prims.convert_element_type.default and not is_widening(node)


def source_of_view(node: Node) -> Node | None:
    """What a reshaping view or a widening cast reads; None for any other node."""
    if node.target in RESHAPES or is_widening(node):
        source = node.args[0]
        return source if isinstance(source, Node) else None
    return None


def unviewed(node: Node) -> Iterator[Node]:
    """`node`, then what it is up to views and widening casts, step by step."""
    current: Node | None = node
    while current is not None:
        yield current
        current = source_of_view(current)


def same_view(a: object, b: object) -> bool:
    """Whether two nodes are one, or look at one in the same way: the same views in the same order."""
    while isinstance(a, Node) and isinstance(b, Node) and a is not b:
        if a.target not in VIEWS or a.target is not b.target or a.args[1:] != b.args[1:]:
            return False
        a, b = a.args[0], b.args[0]
    return a is b


def getitems(node: Node) -> dict[int, Node]:
    """Position -> the node that takes it from `node`'s tuple (the first, if several do)."""
    taken: dict[int, Node] = {}
    for user in node.users:
        if user.target is operator.getitem:
            taken.setdefault(int(user.args[1]), user)  # type: ignore[arg-type]
    return taken


def between(
    order: Mapping[Node, int],
    sources: Collection[Node],
    results: Collection[Node],
    stops: Collection[Node] = (),
    may: Callable[[Node], bool] | None = None,
) -> list[Node]:
    """Nodes on the paths from `sources` to `results`, those included, in `order`.

    A path ends at `stops` and at what `may` says not to walk; sources are not included.
    """
    seen: set[Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node in seen or node in sources or node.op != "call_function" or (node in stops and node not in results):
            continue
        if may is None or may(node):
            seen.add(node)
            stack.extend(node.all_input_nodes)
    inside: dict[Node, None] = {}
    for node in sorted(seen, key=order.__getitem__):
        if any(arg in sources or arg in inside for arg in node.all_input_nodes):
            inside[node] = None
    return list(inside)


def cone(
    order: Mapping[Node, int], result: Node, stops: Collection[Node], may: Callable[[Node], bool]
) -> tuple[list[Node], list[Node]]:
    """What makes `result` as far as `may` allows, constants included, and the tensors that it reads from beyond.

    Both in `order`; `stops` count as beyond.
    """
    inside: set[Node] = set()
    leaves: set[Node] = set()
    stack = [result]
    while stack:
        node = stack.pop()
        if node in inside or node in leaves:
            continue
        if node not in stops and node.op == "call_function" and (is_constant(node) or may(node)):
            inside.add(node)
            stack.extend(node.all_input_nodes)
        elif fake(node) is not None:
            leaves.add(node)
    nodes, beyond = (sorted(some, key=order.__getitem__) for some in (inside, leaves))
    return nodes, beyond


def is_part(node: Node) -> bool:
    """Whether `node` splits a tensor, or takes a piece of one that was split."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node.target in SPLITS


def absorb(inside: Collection[Node], free: Callable[[Node], bool]) -> set[Node]:
    """`inside`, and the `free` nodes in front of it that only it reads."""
    members = set(inside)
    stack = [arg for node in members for arg in node.all_input_nodes if arg not in members]
    while stack:
        node = stack.pop()
        if node in members or node.op != "call_function" or not free(node):
            continue
        if all(user in members for user in node.users):
            members.add(node)
            stack.extend(node.all_input_nodes)
    return members


def is_constant(node: Node) -> bool:
    """Whether `node` is made of numbers and sizes alone, e.g. an iota or a full."""
    made = node.op == "call_function" and fake(node) is not None and not node.is_impure()
    held = (arg.meta.get("val") for arg in node.all_input_nodes)
    return made and not any(isinstance(value, (Tensor, tuple, list)) for value in held)  # a tuple holds tensors


def is_pointwise(node: Node) -> bool:
    """Whether `node` works element by element: a cast, a reshaping view, or what its operator calls pointwise."""
    if node.target in RESHAPES or node.target is prims.convert_element_type.default:
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def end_of_norm(node: Node, is_weight: Callable[[Node], bool]) -> tuple[Node, Node | None]:
    """The end of a norm, from the product with 1 / RMS on, and its weight: a narrowing cast before and after that."""
    weight, rounded = None, False
    while len(node.users) == 1:
        (user,) = node.users
        others = [arg for arg in user.all_input_nodes if arg is not node]
        if is_narrowing(user) and not rounded:
            rounded = True
        elif user.target is aten.mul.Tensor and len(others) == 1 and weight is None and is_weight(others[0]):
            weight, rounded = others[0], False
        else:
            break
        node = user
    return node, weight


def interface(members: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """What a region of `members`, in graph order, would read and return, each in the order that `outline` gives."""
    inside = set(members)
    read = dict.fromkeys(arg for node in members for arg in node.all_input_nodes if arg not in inside)
    returned = [n for n in members if n.op != "get_attr" and any(user not in inside for user in n.users)]
    return list(read), returned
