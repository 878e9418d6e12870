"""scalings: where a graph divides something by a root mean square, in any of the spellings of that.

    x * rsqrt(mean(y * y) + eps)      x / sqrt(sum(y * y) / D + eps)      x * (1 / sqrt(...))      x * (...) ** -0.5
    x / (sum(y * y) * (1 / D) + eps) ** 0.5

An RMSNorm is a scaling whose x and y are the same; mHC scales a projection by the RMS of what it projects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from v41.passes.matching import RESHAPES, aten, shape, unviewed


@dataclass(frozen=True)
class Scaling:
    """result = operand / sqrt(mean(source ** 2) + eps), the mean over everything a row has."""

    operand: Node
    result: Node
    source: Node
    eps: float


def find_scalings(node: Node) -> list[Scaling]:
    """The products with 1 / RMS that `node`, the root in it, leads to."""
    exponent = node.args[1] if node.target is aten.pow.Tensor_Scalar else None
    inverse = node.target is aten.rsqrt.default or exponent == -0.5
    if not inverse and node.target is not aten.sqrt.default and exponent != 0.5:
        return []
    square = node.args[0]
    eps = 0.0
    match square:
        case Node(target=aten.add.Tensor, args=(Node() as inner, int() | float() as number)) if not square.kwargs:
            square, eps = inner, float(number)
    source = _mean_square(square) if isinstance(square, Node) else None
    if source is None:
        return []
    roots = [node]
    if not inverse:
        roots = [user for user in node.users if user.target is aten.reciprocal.default]
    found = [
        Scaling(operand, reader, source, eps)
        for root in roots
        for view, reader in _readers(root)
        if reader.target is aten.mul.Tensor and len(reader.all_input_nodes) == 2
        for operand in reader.all_input_nodes
        if operand is not view
    ]
    quotients = [] if inverse else [(view, reader) for view, reader in _readers(node)]
    found += [
        Scaling(reader.args[0], reader, source, eps)
        for view, reader in quotients
        if reader.target is aten.div.Tensor and reader.args[1] is view and isinstance(reader.args[0], Node)
    ]
    return found


def _mean_square(node: Node) -> Node | None:
    """x of mean(x * x) over all but the rows, however the mean is taken."""
    *_, node = unviewed(node)
    match node.target, node.args:
        case aten.mean.dim, (Node() as square, list() as axes, *_) if not node.kwargs:
            by = None
        case (aten.div.Tensor | aten.mul.Tensor), (Node(args=(Node() as square, list() as axes, *_)) as total, by):
            if total.target is not aten.sum.dim_IntList or total.kwargs:
                return None
        case _:
            return None
    sizes = shape(square)
    width = 1
    for axis in range(1, len(sizes)):
        size = sizes[axis]
        if axis not in [each % len(sizes) for each in axes] or not isinstance(size, int):
            if size != 1:
                return None
            size = 1
        width *= size
    counts = by is None or by == (width if node.target is aten.div.Tensor else 1 / max(width, 1))
    if 0 in [each % len(sizes) for each in axes] or not counts:
        return None
    same = square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    return square.args[0] if same else None  # type: ignore[return-value]


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """(the view of `node` that is read, who reads it)."""
    stack = [node]
    while stack:
        view = stack.pop()
        for user in view.users:
            times_1 = user.target is aten.mul.Tensor and user.args[1] == 1  # torch takes 1 / x for reciprocal(x) * 1
            if user.target in RESHAPES or user.target is aten.expand.default or times_1:
                stack.append(user)
            else:
                yield view, user
