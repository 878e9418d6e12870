"""reinplace_cache_writes: a write to an input that AOTAutograd made functional happens in place again.

    before   view(cache) -> index_put(view, slots, rows) -> view -> copy_(cache, that)    copies all of it each step
    after    view(cache) -> index_put_(view, slots, rows)                                 writes the rows

Site: a copy_ into an input. Legal when all RULES hold; else the copy_ stays, which is right and slow. Several writes
in a chain, and writes through slices and selections, make one site. Exact because the same operators write the same
values at the same places, and every reader finds the version it read before: it stands behind that version's write
and before the next. Comes after the passes that expect a functional graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from v41._compat import known_equal, outputs_rebuilt_from_inputs
from v41.passes.analysis.effects import viewed_args, written_args
from v41.passes.sites import Rule, broken_rule
from v41.regions import invoke_subgraph
from v41.report import Decision, applied, refused

aten = torch.ops.aten
IN_PLACE: dict[object, Any] = {  # a functional write -> the same write into its first argument
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.copy.default: aten.copy_.default,
}
PART: dict[object, Any] = {  # a functional write of a part -> the view that is this part
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
Path = tuple[str, ...]  # the views that lead from the input to a value, each as text


@dataclass(frozen=True)
class Place:
    """Where in the input's memory a value lies, how many writes it has seen. None: a mix that no moment ever holds."""

    path: Path
    version: int | None


@dataclass
class Site:
    """A copy_ into an input and, in graph order, all that touches the memory it writes."""

    copy: Node
    places: dict[Node, Place]
    writes: list[tuple[Node, Path, int]] = field(default_factory=list)  # node, what it writes, writes before
    reads: list[tuple[Node, Node, int]] = field(default_factory=list)  # node, what it reads, writes before
    shapes: dict[Path, str] = field(default_factory=dict)  # shape that a path has before any reshape

    @property
    def final(self) -> Node:
        """The value that the input has in the end."""
        assert isinstance(self.copy.args[1], Node)
        return self.copy.args[1]


def find_sites(gm: GraphModule) -> list[Site]:
    """Every copy_ into an input, with its writes, views and readers."""
    copies = [node for node in gm.graph.nodes if node.target is aten.copy_.default and node.args[0].op == "placeholder"]
    return [trace(gm, copy) for copy in copies if isinstance(copy.args[1], Node)]


def trace(gm: GraphModule, copy: Node) -> Site:
    """What touches the memory that `copy` writes, as if all writes that lead to its value were in place."""
    target = copy.args[0]
    assert isinstance(target, Node)
    site = Site(copy, {target: Place((), 0)}, shapes={(): shape_of(target)})
    spine = _spine(copy)
    for node in gm.graph.nodes:
        touched = [arg for arg in node.all_input_nodes if arg in site.places]
        if node is copy or not touched:
            continue
        base, now = node.args[0], len(site.writes)
        if node in spine and base in site.places and node.target in PART and node.args[1] in site.places:
            site.places[node] = _merged(site, node)
        elif node in spine and base in site.places and (node.target in IN_PLACE or node.target in PART):
            path = site.places[base].path
            site.writes.append((node, (*path, _part(node)) if node.target in PART else path, now))
            site.places[node] = Place(path, now + 1)
            site.reads += [(node, arg, now) for arg in touched]
        elif _is_view(node, touched):
            site.places[node] = Place(_path(site, node), site.places[touched[0]].version)
        else:
            site.reads += [(node, arg, now) for arg in touched]
    return site


def _is_view(node: Node, touched: list[Node]) -> bool:
    """Whether `node` only looks at its first argument, the one it touches. A region that returns a view is no view."""
    known = touched == node.all_input_nodes[:1] == viewed_args(node) and node.target is not invoke_subgraph
    return known and not written_args(node)


def _spine(copy: Node) -> set[Node]:
    """What may become the value of `copy`: back from it through views, the base of writes, and written parts."""
    spine: set[Node] = set()
    stack = [copy.args[1]]
    while stack:
        node = stack.pop()
        if isinstance(node, Node) and node not in spine:
            spine.add(node)
            follows = (node.target in PART and 2) or (node.target in IN_PLACE or bool(viewed_args(node)))
            stack.extend(node.args[: int(follows)])
    return spine


def _merged(site: Site, node: Node) -> Place:
    """A part put back that was written in place already: nothing is left to do, if only it was written meanwhile."""
    base, source = (site.places[arg] for arg in node.args[:2])  # type: ignore[index]
    part = (*base.path, _part(node))
    since = site.writes[base.version or 0 : source.version]
    whole = base.version is not None and source.version is not None and base.version <= source.version
    inside = source.path == part and all(path[: len(part)] == part for _, path, _ in since)
    return Place(base.path, source.version if whole and inside else None)


def _path(site: Site, view: Node) -> Path:
    base = view.args[0]
    assert isinstance(base, Node)
    path = site.places[base].path
    if view.target not in RESHAPES:
        path = (*path, _text(view, view.args[1:]))
        site.shapes[path] = shape_of(view)
        return path
    path = path[:-1] if path and path[-1].startswith("shape ") else path
    return path if site.shapes[path] == shape_of(view) else (*path, f"shape {shape_of(view)}")


def _part(write: Node) -> str:
    """The text of the view that `write` writes, as `_path` would spell it."""
    return _text(write, write.args[2:])


def _text(node: Node, rest: tuple[Any, ...]) -> str:
    target = PART.get(node.target, node.target)
    arguments = getattr(getattr(target, "_schema", None), "arguments", ())[1:]
    filled = [rest[i] if i < len(rest) else node.kwargs.get(a.name, a.default_value) for i, a in enumerate(arguments)]
    return f"{target} {filled or rest}"


def shape_of(node: Node) -> str:
    return str(tuple(node.meta["val"].shape))


def is_no_chain_of_writes(site: Site) -> Node | None:
    """Back from the copy_ there are only known views and writes, each of them seeing exactly the writes before it."""
    end = site.places.get(site.final)
    if end is None or end.path or site.final.meta["val"].dtype != site.copy.args[0].meta["val"].dtype:  # type: ignore[union-attr]
        return site.final
    broken = (node for node, _, before in site.writes if site.places[node.args[0]].version != before)  # type: ignore[index]
    return next(broken, None if end.version == len(site.writes) else site.final)


def is_read_when_overwritten(site: Site) -> Node | None:
    return next((n for n, value, now in site.reads if n.op != "output" and site.places[value].version != now), None)


def is_copied_from_itself(site: Site) -> Node | None:
    return next((node for node, _, _ in site.writes if any(arg in site.places for arg in _operands(node))), None)


def is_written_or_aliased_otherwise(site: Site) -> Node | None:
    others = (n for n, value, _ in site.reads if n.op != "output" and value in (*written_args(n), *viewed_args(n)))
    return next(others, None)


def changes_strides(site: Site) -> Node | None:
    """A functional write may compact strides; what views its result would see others. A part put back may."""
    for node, _, _ in site.writes:
        base = node.args[0]
        assert isinstance(base, Node)
        same = all(map(known_equal, base.meta["val"].stride(), node.meta["val"].stride()))
        if not same and any(user.target not in PART for user in node.users):
            return node
    return None


def is_returned(site: Site) -> Node | None:
    """An output handed out would change with the input's next write. AOTAutograd rebuilds views of inputs itself."""
    output = site.copy.graph.output_node()
    results: Any = output.args[0]
    kept = outputs_rebuilt_from_inputs(len(results))
    return next(
        (v for i, v in enumerate(results) if v in site.places and v.op != "placeholder" and i not in kept), None
    )


RULES: tuple[Rule[Site], ...] = (
    ("ends a chain of known views and writes of the input", is_no_chain_of_writes),
    ("is not read in a state that a write has overwritten", is_read_when_overwritten),
    ("takes no values from the memory it writes", is_copied_from_itself),
    ("is neither written nor aliased by other operators", is_written_or_aliased_otherwise),
    ("keeps the strides that views of its result rely on", changes_strides),
    ("is not returned as a value of its own", is_returned),
)


def reinplace_cache_writes(gm: GraphModule) -> list[Decision]:
    """Puts every legal write of `gm` back in place. One decision a copy_ into an input, in graph order."""
    decisions, legal = [], []
    for site in find_sites(gm):
        broken = broken_rule(site, RULES)
        decisions.append(refused(site.copy, *broken) if broken else applied(site.copy))
        legal += [] if broken else [site]
    for site in legal:
        _edit(gm, site)
    return decisions


def _edit(gm: GraphModule, site: Site) -> None:
    writes = {node for node, _, _ in site.writes}
    for node in [node for node in site.places if node in writes or node.target in PART]:
        base, graph = node.args[0], gm.graph
        assert isinstance(base, Node)
        with graph.inserting_before(node):
            if node in writes and node.target in PART:
                part = graph.call_function(PART[node.target], (base, *node.args[2:]), node.kwargs)
                part.meta = _meta(node, PART[node.target](*map_arg(part.args, _value), **map_arg(part.kwargs, _value)))
                written = graph.call_function(aten.copy_.default, (part, node.args[1]))
                written.meta = _meta(node, part.meta["val"])
            elif node in writes:
                written = graph.call_function(IN_PLACE[node.target], node.args, node.kwargs)
                written.meta = _meta(node, base.meta["val"])
        node.replace_all_uses_with(base)
        graph.erase_node(node)
    target = site.copy.args[0]
    assert isinstance(target, Node)
    site.copy.replace_all_uses_with(target)  # a function that returns the input it wrote returns the copy_
    gm.graph.erase_node(site.copy)
    for node in reversed([node for node in gm.graph.nodes if node in site.places]):
        if not node.users and node.op != "placeholder":
            gm.graph.erase_node(node)


def _operands(write: Node) -> list[Node]:
    """What a write reads besides its base."""
    found: list[Node] = []
    map_arg((write.args[1:], write.kwargs), found.append)
    return found


def _value(node: Node) -> Any:
    return node.meta["val"]


def _meta(origin: Node, value: Any) -> dict[str, Any]:
    kept = ("stack_trace", "nn_module_stack", "custom")
    return {"val": value} | {key: origin.meta[key] for key in kept if key in origin.meta}
