"""buffers: the memory behind every tensor of a plan: who owns it, from when to when it is needed, its bytes.

arg3_1     i64[u0]          runtime   start .. piece_9    8*u0      an input of a changing size, copied in
arg5_1     u8[9, 64, 528]   caller    start .. end        304128    a cache, a weight
embedding  bf16[u0, 512]    piece_0   piece_0 .. piece_2  1024*u0
view       bf16[u0, 4, 128] piece_0   piece_1 .. piece_2  1024*u0   views embedding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import SymInt, Tensor

from v41._compat import as_python
from v41.passes.analysis.happens_before import START_AT
from v41.passes.analysis.plan_facts import PlanFacts, views_in
from v41.plan import Buffer, Plan


def buffers(plan: Plan, values: Mapping[str, object]) -> dict[str, Buffer]:
    """The buffers of `plan`, which has none yet. values: the fake value of each name."""
    views: dict[str, tuple[str, ...]] = dict.fromkeys(plan.inputs, ())
    for piece in plan.pieces:
        views |= views_in(piece.body, piece.reads, piece.returns)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    made = {
        name: Buffer(name, plan.values[name], "caller", START_AT, START_AT, _bytes(value), views[name])
        for name, value in tensors.items()
    }
    facts = PlanFacts(replace(plan, buffers=made))
    written = {facts.memory[name] for piece in plan.pieces for name in piece.writes}
    owners = {
        name: facts.name(facts.made[name]) if facts.made[name] != START_AT
        else "runtime" if name not in written and _changes(value)
        else "caller"
        for name, value in tensors.items()
    }  # fmt: skip
    return {
        name: replace(buffer, owner=owners[facts.memory[name]], born=facts.lives[name][0], dies=facts.lives[name][1])
        for name, buffer in made.items()
    }


def buffers_again(plan: Plan) -> dict[str, Buffer]:
    """Those of `plan`, whose pieces have other places or parts since it got the ones it has."""
    values: dict[str, object] = {}
    for piece in plan.pieces:
        (results,) = piece.body.graph.output_node().args
        nodes = (*piece.body.graph.find_nodes(op="placeholder"), *results)  # type: ignore[misc]
        pairs = zip((*piece.reads, *piece.returns), nodes, strict=True)
        values |= {name: node.meta.get("val") for name, node in pairs}
    unread = {name: buffer for name, buffer in plan.buffers.items() if name in plan.inputs and name not in values}
    ends = {name: len(plan.pieces) if name in plan.outputs else START_AT for name in unread}
    return buffers(plan, values) | {name: replace(buffer, dies=ends[name]) for name, buffer in unread.items()}


def _changes(value: Tensor) -> bool:
    return any(isinstance(size, SymInt) for size in value.shape)


def _bytes(value: Tensor) -> str:
    return as_python(value.numel() * value.element_size())
