"""changes: what differs between two inspections, layer by layer; nothing where the compiler found and did the same.

    layer 23  mhc_boundary 1 of 2: eps 1e-06 -> 0.001
    layer 23  newly refused: "the streams are collapsed once, for one norm"  model_def/mhc.py:67  return (A * X).sum(1)
    layer 24  2 of 4 pieces became 2 others
    layer 25  piece 3 of 9: reads cache.rings.25 -> cache.rings.24

Both are layers as `v41 inspect --json` prints them. Names of nodes and pieces are left out: they are numbered through
the whole graph, so one node more renames all behind it. What pieces read and write has names of wiring.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from v41.tools.tables import counted

LayerValues = dict[str, Any]  # one entry of "layers"


def changes(before: Sequence[LayerValues], after: Sequence[LayerValues]) -> list[tuple[int | None, str]]:
    """(layer, what differs there), in order. Layer None: outside of layers."""
    found = []
    for was, now in zip_longest(before, after):
        if was is None or now is None:
            found.append(((was or now)["layer"], "is in one of them alone"))
        else:
            found += [(was["layer"], text) for text in (*_role(was, now), *_regions(was, now), *_refusals(was, now))]
            found += [(was["layer"], text) for text in _pieces(was, now)]
    return found


def _role(was: LayerValues, now: LayerValues) -> Iterator[str]:
    if was["role"] != now["role"]:
        yield f"role: {was['role']} -> {now['role']}"


def _regions(was: LayerValues, now: LayerValues) -> Iterator[str]:
    old, new = was["regions"], now["regions"]
    kinds, others = ([region["kind"] for region in regions] for regions in (old, new))
    if kinds != others:
        yield f"regions: {', '.join(kinds) or '-'} -> {', '.join(others) or '-'}"
        return
    for number, (one, other) in enumerate(zip(old, new, strict=True), 1):
        for name in dict.fromkeys([*one["attrs"], *other["attrs"]]):
            values = [region["attrs"].get(name, "-") for region in (one, other)]
            if values[0] != values[1]:
                yield f"{one['kind']} {number} of {len(old)}: {name} {values[0]} -> {values[1]}"


def _refusals(was: LayerValues, now: LayerValues) -> Iterator[str]:
    old, new = (Counter(f'"{each["rule"]}"  {each["source"]}' for each in view["refused"]) for view in (was, now))
    yield from (f"newly refused: {text}" for text in (new - old).elements())
    yield from (f"no longer refused: {text}" for text in (old - new).elements())


def _pieces(was: LayerValues, now: LayerValues) -> Iterator[str]:
    keys, others = ([piece["key"] for piece in view["pieces"]] for view in (was, now))
    old, new = Counter(keys), Counter(others)
    if old != new:
        yield f"{(old - new).total()} of {counted(old.total(), 'piece')} became {counted((new - old).total(), 'other')}"
    elif keys != others:
        yield f"the {len(keys)} pieces come in another order"
    else:
        for number, (one, other) in enumerate(zip(was["pieces"], now["pieces"], strict=True), 1):
            for verb in ("reads", "writes"):
                pairs = zip_longest(one[verb], other[verb], fillvalue="-")
                yield from (f"piece {number} of {len(keys)}: {verb} {a} -> {b}" for a, b in pairs if a != b)
