"""wiring: what each piece reads and writes, told so that it does not hang on how nodes are numbered.

layers.3.attn.wkv.weight        an input of the program, as the model calls it
own 2.0                         what the layer's own piece 2 returned first
ends bool[u0, 128] 1            the second such value that was made outside of layers: one mask of two
layer 2 bf16[u0, 4, 5120]       what another layer made, by its type alone: how many values it makes is its business
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from v41.plan import Plan
from v41.tools.inspect import LayerView

Wires = tuple[list[str], list[str]]  # read, written


def wiring(plan: Plan, views: Sequence[LayerView], parameters: Mapping[str, str]) -> dict[str, Wires]:
    """By name of the piece. `parameters`: what the model calls the inputs of the plan."""
    made = {value: (view.layer, place, output)
            for view in views for place, piece in enumerate(view.pieces)
            for output, value in enumerate(piece.returns)}  # fmt: skip
    ends = dict(outside(plan, [value for value, (layer, *_) in made.items() if layer is None]))

    def told(value: str, layer: int | None) -> str:
        if value not in made:
            return parameters.get(value, value)
        maker, place, output = made[value]
        if maker == layer:
            return f"own {place}.{output}"
        return ends[value] if maker is None else f"layer {maker} {plan.values[value]}"

    return {
        piece.name: (
            [told(each, view.layer) for each in piece.reads],
            [told(each, view.layer) for each in piece.writes],
        )
        for view in views
        for piece in view.pieces
    }


def outside(plan: Plan, values: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each of `values`, and its type with its number among those of that type."""
    seen: Counter[str] = Counter()
    for value in values:
        spec = plan.values[value]
        yield value, f"ends {spec} {seen[spec]}"
        seen[spec] += 1
