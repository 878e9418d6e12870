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
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import SymInt
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.passes.fold_sinkhorn import KIND as SINKHORN
from v41.passes.fold_sinkhorn import Step, find_chains
from v41.passes.matching import RESHAPES, VIEWS, aten, fake, is_narrowing, is_widening, same_sizes, shape, unviewed
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
# What weights may go through and stay weights.
PREPARES = LINEAR | {aten.repeat.default, aten.mm.default, aten.t.default}


@dataclass(frozen=True)
class Gate:
    """factor * sigmoid(columns) + eps."""

    columns: tuple[int, int]
    result: Node
    factor: float
    eps: float


@dataclass(frozen=True)
class Comb:
    """Steps of normalisation after a softmax or an exp plus head_eps. result None: what follows the head is none."""

    columns: tuple[int, int]
    head: Node
    head_kind: str
    head_axis: int | None
    head_eps: float
    result: Node | None = None
    chain: tuple[Step, ...] = ()  # where it is no region yet
    first_axis: int = 0
    steps: int = 0
    eps: float = 0.0


@dataclass(frozen=True)
class Coefficients:
    """All that one projection predicts from the streams X [T, n, D]."""

    projection: Node
    width: int  # its columns
    streams: Node
    scaling: Scaling | None
    gates: tuple[Gate, ...]  # by column
    combs: tuple[Comb, ...]

    @property
    def pre_and_post(self) -> tuple[Gate, Gate]:
        """Of two gates, pre first: as their columns lie, unless only the first has a factor."""
        first, second = self.gates
        return (second, first) if first.factor != 1 and second.factor == 1 else (first, second)


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
        self.given = {node for node in self.order if node.op == "placeholder" and self._fits(node)}
        self.landmarks = self._predicted() | self.given | {each.streams for each in self.coefficients}
        self.posts = self._posts() if self.coefficients else []
        self.landmarks |= {each.result for each in self.posts}
        scalings = self.scalings.values() if self.coefficients else ()
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
                    gates.append(_gate(user, columns))
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
            case aten.sum.dim_IntList, (Node(target=aten.mul.Tensor, args=(Node() as a, Node() as b)), [axis], *_):
                if axis in (-1, len(shape(a)) - 1) and self.is_weight(a) is not self.is_weight(b):
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
            elif node.target in RESHAPES or node.target is aten.clone.default or is_widening(node):
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
                elif user.target in RESHAPES or is_widening(user) or self._is_affine(user, value):
                    stack.append((user, (low, high), scaled))
                else:
                    stack += [(part, columns, scaled) for part, columns in _parts_of_columns(user, low, high, last)]

    def _is_affine(self, user: Node, value: Node) -> bool:
        """Whether `user` multiplies `value` by a weight, or adds one."""
        if user.target not in (aten.mul.Tensor, aten.add.Tensor) or user.kwargs or len(user.all_input_nodes) != 2:
            return False
        (other,) = (node for node in user.all_input_nodes if node is not value)
        return self.is_weight(other)

    def _comb(self, value: Node, user: Node, columns: tuple[int, int]) -> Comb | None:
        """The comb whose head starts at `user`, a reader of the logits `value` [T, n, n]."""
        head = _softmax(value, user)
        if head is None and user.target is aten.exp.default:
            head = user, "exp", None
        if head is None or len(shape(value)) < 2 or not known_equal(*shape(value)[-2:]):
            return None
        end, kind, axis = head
        shifted = _number_added(end)
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
        """Post maps of all coefficients, and of those that come as inputs of the program."""
        found = [
            self._post(each.pre_and_post[1].result, comb.result, each.streams)
            for each in self.coefficients
            for comb in each.combs
            if len(each.gates) == 2 and comb.result is not None
        ]
        given = [node for node in self.nodes if node in self.given]
        read = {each.streams: each for each in self.coefficients}
        some = self.coefficients[0].streams
        for comb_given in given:
            for post_given in given if len(shape(comb_given)) == 3 else ():
                post = self._post(post_given, comb_given, some) if len(shape(post_given)) == 2 else None
                found.append(post if post is not None and post.result in read else None)
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
                nodes = self.between({post, comb}, [result], self.landmarks, _is_linear_or(result))
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
        known = [cast for cast in casts if any(cast is each.streams for each in self.coefficients)]
        return known[0] if known else casts[0] if casts and len(node.users) == 1 else node

    # ---- collapse

    def _collapse(self, scaling: Scaling) -> Collapse | None:
        """The collapse that `scaling` normalises, if it reads streams."""
        read = set(unviewed(scaling.source))
        h = next((node for node in unviewed(scaling.operand) if node in read), None)
        if h is None:
            return None
        *_, h = unviewed(h)
        sources = {each.streams for each in self.coefficients} | {each.result for each in self.posts}
        if h in self.landmarks:
            return None
        nodes = self.between(sources, [h], self.landmarks, _is_linear_or(h))
        streams = {arg for node in nodes for arg in node.all_input_nodes if arg in sources}
        if len(streams) != 1:
            return None
        result, weighted = self._norm_result(scaling.result)
        norm = self.between({h}, [result], set(), None)
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
        prepares = node.target in PREPARES or is_widening(node) or is_narrowing(node)
        return prepares and bool(node.all_input_nodes) and all(arg in self._weights for arg in node.all_input_nodes)

    def between(
        self,
        sources: Collection[Node],
        results: Iterable[Node],
        stops: Collection[Node],
        may: Callable[[Node], bool] | None,
    ) -> list[Node]:
        """Nodes on the paths from `sources` to `results`, those included, in graph order; `may` says what to walk."""
        seen: set[Node] = set()
        stack = list(results)
        while stack:
            node = stack.pop()
            if node in seen or node in sources or node.op != "call_function" or (may is not None and not may(node)):
                continue
            if node in stops and node not in results:
                continue
            seen.add(node)
            stack.extend(node.all_input_nodes)
        inside: dict[Node, None] = {}
        for node in sorted(seen, key=self.order.__getitem__):
            if any(arg in sources or arg in inside for arg in node.all_input_nodes):
                inside[node] = None
        return list(inside)

    def absorb(self, inside: Collection[Node]) -> set[Node]:
        """`inside`, and the views, widening casts and preparations of weights that only it reads."""
        members = set(inside)
        stack = [arg for node in members for arg in node.all_input_nodes if arg not in members]
        while stack:
            node = stack.pop()
            if node in members or node in self.landmarks or node.op != "call_function":
                continue
            free = node.target in RESHAPES or is_widening(node) or self.is_weight(node) or self._views_landmark(node)
            if free and all(user in members for user in node.users):
                members.add(node)
                stack.extend(node.all_input_nodes)
        return members

    def _views_landmark(self, node: Node) -> bool:
        """Whether `node` is a view, of a part perhaps, of a landmark or of one value per row and stream."""
        vectors = [shape(each.streams)[:2] for each in self.coefficients]
        while node.target in VIEWS or is_widening(node):
            node = node.args[0]  # type: ignore[assignment]
            if node in self.landmarks or any(same_sizes(shape(node), vector) for vector in vectors):
                return True
        return False

    def _predicted(self) -> set[Node]:
        gates = {gate.result for each in self.coefficients for gate in each.gates}
        return gates | {comb.result for each in self.coefficients for comb in each.combs if comb.result is not None}

    def _fits(self, node: Node) -> bool:
        """Whether an input has the shape of predicted coefficients."""
        streams = [shape(each.streams) for each in self.coefficients]
        return any(same_sizes(shape(node), s[:2]) or same_sizes(shape(node), (*s[:2], s[1])) for s in streams)


def _is_streams(node: Node, rows: int | SymInt) -> bool:
    sizes = shape(node)
    return len(sizes) == 3 and known_equal(sizes[0], rows) and all(isinstance(size, int) for size in sizes[1:])


def _parts_of_columns(user: Node, low: int, high: int, last: int) -> list[tuple[Node, tuple[int, int]]]:
    """The pieces that a split or a slice along the last axis takes from columns low..high."""
    match user.target, user.args:
        case aten.split_with_sizes.default, (_, list() as sizes, *axis) if (axis or [0])[0] in (-1, last):
            starts = [low + sum(sizes[:i]) for i in range(len(sizes))]
            items = [item for item in user.users if item.target is operator.getitem]
            return [(item, (starts[i], starts[i] + sizes[i])) for item in items if isinstance(i := item.args[1], int)]
        case aten.slice.Tensor, (_, axis, int() as start, int() as end) if axis in (-1, last):
            width = high - low
            start, end = (max(0, each + width) if each < 0 else min(each, width) for each in (start, end))
            return [(user, (low + start, low + end))]
    return []


def _gate(sigmoid: Node, columns: tuple[int, int]) -> Gate:
    """The sigmoid with the number it is multiplied by and the one added, at most one each, in that order."""
    gate = Gate(columns, sigmoid, 1.0, 0.0)
    for user in gate.result.users:
        match user.target, user.args:
            case aten.mul.Tensor, (_, int() | float() as factor):
                gate = replace(gate, result=user, factor=float(factor))
                break
    added = _number_added(gate.result)
    return gate if added is None else replace(gate, result=added[0], eps=added[1])


def _number_added(node: Node) -> tuple[Node, float] | None:
    for user in node.users:
        match user.target, user.args:
            case aten.add.Tensor, (_, int() | float() as number) if not user.kwargs:
                return user, float(number)
    return None


def _softmax(logits: Node, user: Node) -> tuple[Node, str, int | None] | None:
    """(result, "softmax", axis from the end) of the softmax that starts at `user`, whole or decomposed."""
    last = len(shape(logits))
    match user.target, user.args:
        case aten._softmax.default, (_, int() as axis, _):
            return user, "softmax", axis % last - last
        case aten.amax.default, (_, [int() as axis], True):
            for shifted in user.users:
                for power in shifted.users if shifted.args == (logits, user) else ():
                    for quotient in power.users if power.target is aten.exp.default else ():
                        match quotient.target, quotient.args:
                            case aten.div.Tensor, (_, Node(target=aten.sum.dim_IntList, args=(total, [along], True))):
                                if quotient.args[0] is power and total is power and along == axis:
                                    return quotient, "softmax", axis % last - last
    return None


def _is_linear_or(rounding: Node) -> Callable[[Node], bool]:
    """Which nodes a mix may be made of: linear ones, and the one that rounds it."""
    return lambda node: node is rounding or node.target in LINEAR or is_widening(node)
