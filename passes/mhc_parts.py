"""mhc_parts: the parts of an mHC boundary as they lie in a canonical ATen graph. Found, not judged.

    coefficients   X -> flatten -> projection / RMS -> columns * scale + base -> pre = sigmoid + eps, post = k sigmoid,
                   comb = Sinkhorn(softmax + eps)
    post map       X' = round(post_k y + sum_j comb_jk X_j), from coefficients predicted earlier
    collapse       h = round(sum_j pre_j X_j), and the RMSNorm that reads it

Anchors: the projection, the first value that both post and comb reach, the scaling of a norm. From there nodes are
walked by what they may be, not by a fixed order, so the spelling of a contraction and the casts and views around it do
not matter. What a contraction computes is for `analysis.probe` to say.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from torch import SymInt
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.passes.fold_sinkhorn import KIND as SINKHORN
from v41.passes.fold_sinkhorn import find_chains
from v41.passes.matching import (
    RESHAPES,
    VIEWS,
    absorb,
    aten,
    between,
    fake,
    is_narrowing,
    is_widening,
    same_sizes,
    shape,
    unviewed,
)
from v41.passes.mhc_heads import Comb, gate_of, head_of, number_added, parts_of_columns
from v41.passes.mhc_predictions import Coefficients, predictions
from v41.passes.scalings import Scaling, find_scalings
from v41.regions import is_region, region_of

# Linear in each operand, row by row. Not here: `mm` (a weight is no stream), other reductions, narrowing casts (they
# round), `div` (a quotient of streams is no mix).
LINEAR = VIEWS | {
    aten.clone.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.sum.dim_IntList,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.cat.default,
    aten.split_with_sizes.default,
    aten.unbind.int,
    operator.getitem,
}


@dataclass(frozen=True)
class PostMap:
    """nodes: on the paths from post and comb to the result."""

    post: Node
    comb: Node
    result: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class Collapse:
    """h from the streams, and the norm. nodes: on the paths from the streams to h; norm_nodes: from h to the result."""

    streams: Node
    h: Node
    nodes: frozenset[Node]
    result: Node
    norm_nodes: frozenset[Node]
    eps: float
    weighted: bool


class Parts:
    """The parts found in one graph. Built once; the graph must not change while it is in use."""

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = list(gm.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self._weights: set[Node] = set()
        for node in self.order:
            if self._weighs(node):
                self._weights.add(node)
        self.scalings = {scaling.result: scaling for node in self.order for scaling in find_scalings(node)}
        self._chains = {chain[0].source: chain for chain in find_chains(gm, least=1)}
        self.coefficients = [each for node in self.order if (each := self._coefficients(node)) is not None]
        self.predictions = predictions(gm, self.coefficients)
        sizes = {str(shape(each.streams)[:2]): shape(each.streams)[:2] for each in self.predictions}
        self.vectors = list(sizes.values())  # the shapes of pre and post
        self.given = {node for node in self.order if node.op == "placeholder" and self._fits(node)}
        predicted = {node for each in self.predictions for node in (*each.pres, *each.posts, each.comb)}
        self.predicted_from = self._below(predicted)
        self.landmarks = predicted | self.given | {each.streams for each in self.predictions}
        self.posts = self._posts()
        self.mixed = {each.streams for each in self.predictions} | {each.result for each in self.posts}
        self.landmarks |= self.mixed
        scalings = self.scalings.values() if self.predictions else ()
        self.collapses = [found for each in scalings if (found := self._collapse(each)) is not None]

    # ---- coefficients

    def _coefficients(self, node: Node) -> Coefficients | None:
        """What `node`, a product with a weight, predicts, if its columns go to a gate and to a head of a comb."""
        operand = self._projected(node)
        width = shape(node)[-1] if operand is not None and shape(node) else None
        if operand is None or not isinstance(width, int) or any(size != 1 for size in shape(node)[:-2]):
            return None
        streams, scaling = self._streams(operand, shape(node)[-2])
        if streams is None:
            return None
        gates, combs = [], []
        for value, columns, scaled in self._columns(node, width):
            scaling = scaling or scaled
            for user in value.users:
                if user.target is aten.sigmoid.default:
                    gates.append(gate_of(user, columns))
                elif (comb := self._comb(value, user, columns)) is not None:
                    combs.append(comb)
        if not gates or not combs:
            return None
        gates.sort(key=lambda gate: gate.columns)
        return Coefficients(node, width, streams, scaling, tuple(gates), tuple(combs))

    def _projected(self, node: Node) -> Node | None:
        """The operand of a projection that is no weight: mm or bmm with a weight, or a sum of products with one."""
        match node.target, node.args:
            case (aten.mm.default | aten.bmm.default), (Node() as left, Node() as right):
                return left if self.is_weight(right) and not self.is_weight(left) else None
            case aten.sum.dim_IntList, (Node(target=aten.mul.Tensor, args=(Node() as a, Node() as b)) as m, [axis], *_):
                if axis in (-1, len(shape(m)) - 1) and self.is_weight(a) is not self.is_weight(b):
                    return b if self.is_weight(a) else a
        return None

    def _streams(self, operand: Node, rows: int | SymInt) -> tuple[Node | None, Scaling | None]:
        """The streams [T, n, D] that a projection reads flat, and the scaling it reads them through, if any."""
        chain, scaling = [operand], None
        while True:
            node = chain[-1]
            if scaling is None and node in self.scalings:
                scaling = self.scalings[node]
                chain.append(scaling.operand)
            elif _keeps_values(node):
                chain.append(node.args[0])  # type: ignore[arg-type]
            else:
                break
        flat = {i for i, node in enumerate(chain) if _is_streams(node, rows)}
        if not flat or len(shape(operand)) > 3 or max(flat) == 0:
            return None, None
        at = max(flat)  # the innermost, or a copy of it if nobody reads the original
        while at - 1 in flat and not is_widening(chain[at - 1]) and list(chain[at].users) == [chain[at - 1]]:
            at -= 1
        return chain[at], scaling

    def _columns(self, node: Node, width: int) -> Iterator[tuple[Node, tuple[int, int], Scaling | None]]:
        """Values that are columns of the projection, scaled and shifted, with the columns they are."""
        stack: list[tuple[Node, tuple[int, int], Scaling | None]] = [(node, (0, width), None)]
        while stack:
            value, (low, high), scaled = stack.pop()
            yield value, (low, high), scaled
            last = len(shape(value)) - 1
            for user in reversed(list(value.users)):
                scaling = self.scalings.get(user)
                if scaling is not None and scaling.operand is value:
                    stack.append((user, (low, high), scaling))
                elif _keeps_values(user) or self._is_affine(user, value):
                    stack.append((user, (low, high), scaled))
                else:
                    stack += [(part, columns, scaled) for part, columns in parts_of_columns(user, low, high, last)]

    def _is_affine(self, user: Node, value: Node) -> bool:
        """Whether `user` multiplies `value` by a weight, or adds one."""
        if user.target not in (aten.mul.Tensor, aten.add.Tensor) or user.kwargs or len(user.all_input_nodes) != 2:
            return False
        (other,) = (node for node in user.all_input_nodes if node is not value)
        return self.is_weight(other)

    def _comb(self, value: Node, user: Node, columns: tuple[int, int]) -> Comb | None:
        """The comb whose head starts at `user`, a reader of the logits `value` [T, n, n]."""
        head = head_of(value, user)
        if head is None or len(shape(value)) < 2 or not known_equal(*shape(value)[-2:]):
            return None
        end, kind, axis = head
        shifted = number_added(end)
        comb = Comb(columns, end if shifted is None else shifted[0], kind, axis, 0.0 if shifted is None else shifted[1])
        return self._normalised(comb)

    def _normalised(self, comb: Comb) -> Comb:
        """`comb` with the Sinkhorn region or chain that reads its head, if one does."""
        for reader in comb.head.users:
            if is_region(reader, SINKHORN):
                (result,) = reader.users
                return replace(comb, result=result, **region_of(reader).attrs)
        for source in (comb.head, *comb.head.users):
            chain = self._chains.get(source)
            if chain is not None and (source is comb.head or source.target in VIEWS):
                facts = {"first_axis": chain[0].axis, "steps": len(chain), "eps": chain[0].eps}
                return replace(comb, result=chain[-1].nodes[-1], chain=tuple(chain), **facts)  # type: ignore[arg-type]
        return comb

    # ---- post map

    def _posts(self) -> list[PostMap]:
        """Post maps of all predictions, and of coefficients that come as inputs of the program."""
        found = [self._post(post, each.comb, each.streams) for each in self.predictions for post in each.posts]
        given = [node for node in self.nodes if node in self.given]
        read = {each.streams for each in self.coefficients}
        for comb in (node for node in given if len(shape(node)) == 3):
            for post in (node for node in given if len(shape(node)) == 2):
                maps = self._post(post, comb, self.predictions[0].streams)
                found.append(maps if maps is not None and maps.result in read else None)
        return sorted((post for post in found if post is not None), key=lambda post: self.order[post.result])

    def _post(self, post: Node, comb: Node, streams: Node) -> PostMap | None:
        """The map that ends where `post` and `comb` first meet in a value shaped like the streams."""
        reached = {post: 1, comb: 2}
        queue = [(self.order[post], post), (self.order[comb], comb)]
        heapq.heapify(queue)
        while queue:
            _, node = heapq.heappop(queue)  # in graph order: whatever reaches it has been seen
            if reached[node] == 3 and same_sizes(shape(node), shape(streams)):
                result = self._rounded(node)
                nodes = between(self.order, {post, comb}, [result], self.landmarks, _is_linear_or(result))
                return PostMap(post, comb, result, frozenset(nodes))
            for user in node.users:
                if user.target in LINEAR:
                    if user not in reached:
                        heapq.heappush(queue, (self.order[user], user))
                    reached[user] = reached.get(user, 0) | reached[node]
        return None

    def _rounded(self, node: Node) -> Node:
        """`node` after its rounding: the cast that a projection takes for streams, else a cast that alone reads it."""
        casts = [user for user in node.users if is_narrowing(user)]
        known = [cast for cast in casts if cast in self.landmarks]
        return known[0] if known else casts[0] if casts and len(node.users) == 1 else node

    # ---- collapse

    def _collapse(self, scaling: Scaling) -> Collapse | None:
        """The collapse that `scaling` normalises, if it reads streams."""
        read = set(unviewed(scaling.source))
        h = next((node for node in unviewed(scaling.operand) if node in read), None)
        if h is None:
            return None
        *_, h = unviewed(h)
        if h in self.landmarks:
            return None
        nodes = between(self.order, self.mixed, [h], self.landmarks, _is_linear_or(h))
        streams = {arg for node in nodes for arg in node.all_input_nodes if arg in self.mixed}
        if len(streams) != 1:
            return None
        result, weighted = self._norm_result(scaling.result)
        norm = between(self.order, {h}, [result])
        return Collapse(streams.pop(), h, frozenset(nodes), result, frozenset(norm), scaling.eps, weighted)

    def _norm_result(self, node: Node) -> tuple[Node, bool]:
        """The end of a norm, from its scaling: at most one weight, and a narrowing cast before and after it."""
        weighted = rounded = False
        while len(node.users) == 1:
            (user,) = node.users
            others = [arg for arg in user.all_input_nodes if arg is not node]
            if is_narrowing(user) and not rounded:
                rounded = True
            elif user.target is aten.mul.Tensor and len(others) == 1 and not weighted and self.is_weight(others[0]):
                weighted, rounded = True, False
            else:
                break
            node = user
        return node, weighted

    # ---- shared

    def is_weight(self, node: Node) -> bool:
        """Whether `node` is an input without rows, or made of such by linear work and casts."""
        return node in self._weights

    def _weighs(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return fake(node) is not None and not any(isinstance(size, SymInt) for size in shape(node))
        prepares = node.target in LINEAR or is_widening(node) or is_narrowing(node)
        return prepares and bool(node.all_input_nodes) and all(arg in self._weights for arg in node.all_input_nodes)

    def absorb(self, inside: Collection[Node]) -> set[Node]:
        """`inside`, and the views, widening casts and preparations of weights that only it reads."""
        return absorb(inside, self._is_free)

    def _is_free(self, node: Node) -> bool:
        if node in self.landmarks:
            return False
        return node.target in RESHAPES or is_widening(node) or self.is_weight(node) or self._views_landmark(node)

    def _views_landmark(self, node: Node) -> bool:
        """Whether `node` is a view, of a part perhaps, of a landmark or of one value per row and stream."""
        while node.target in VIEWS or is_widening(node):
            node = node.args[0]  # type: ignore[assignment]
            if node in self.landmarks or self._is_vector(node):
                return True
        return False

    def _below(self, above: set[Node]) -> set[Node]:
        """`above`, and all that depends on it."""
        below = set(above)
        for node in self.nodes if above else ():
            if any(arg in below for arg in node.all_input_nodes):
                below.add(node)
        return below

    def _fits(self, node: Node) -> bool:
        """Whether an input has the shape of predicted coefficients."""
        return self._is_vector(node) or any(same_sizes(shape(node), (*sizes, sizes[1])) for sizes in self.vectors)

    def _is_vector(self, node: Node) -> bool:
        return any(same_sizes(shape(node), sizes) for sizes in self.vectors)


def _keeps_values(node: Node) -> bool:
    """Whether the result is the first operand, but for shape, memory and a wider type."""
    return node.target in RESHAPES or node.target is aten.clone.default or is_widening(node)


def _is_streams(node: Node, rows: int | SymInt) -> bool:
    sizes = shape(node)
    return len(sizes) == 3 and known_equal(sizes[0], rows) and all(isinstance(size, int) for size in sizes[1:])


def _is_linear_or(rounding: Node) -> Callable[[Node], bool]:
    """Which nodes a mix may be made of: linear ones, and the one that rounds it."""
    return lambda node: node is rounding or node.target in LINEAR or is_widening(node)
