"""Plan: what runs, in which order, who hands what to whom. Passes write it, the runtime executes it, the CLI prints it.

    inputs   arg0_1 i64[u0]  arg1_1 bf16[32000, 512]
    piece_0  reads arg0_1 arg1_1   returns embedding, mm   key 3fa0...   begins: start of the graph
    piece_1  reads embedding mm    returns getitem         key 81cc...   begins: region mhc_boundary
    outputs  getitem

Every value has one name. Pieces run in order; between two of them exactly the values live that a later piece reads or
the graph returns, and a piece's `frees` are the values nobody reads after it. Pieces with one key share one compiled
artifact.

Sizes are symbols ("u0"), and `sizes` says what each stands for ("rows"): two symbols of one name are always equal. A
piece whose `sizes` are all of one name can be captured once for each value of that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule

from v41.errors import BodyNotKept, PlanUnreadable

SHORT = {
    "torch.float32": "f32",
    "torch.float64": "f64",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.uint8": "u8",
    "torch.bool": "b8",
}


def spec(value: object) -> str:
    """What a fake value is: "bf16[u0, 4, 5120]" for a tensor, "int u0" for a size."""
    if not isinstance(value, Tensor):
        return f"{'int' if hasattr(value, 'node') else type(value).__name__} {value}"
    dtype = str(value.dtype)
    short = SHORT.get(dtype, dtype.removeprefix("torch.").replace("bfloat", "bf").replace("float", "f"))
    return f"{short}[{', '.join(map(str, value.shape))}]"


class NotKept:
    """Stands for the body of a piece that came from a cache or from text."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BodyNotKept("Piece.body")


@dataclass(frozen=True)
class Piece:
    """A run of nodes compiled and called as one. `body` takes `reads` in order and returns `returns` as a tuple."""

    name: str
    reads: tuple[str, ...]
    returns: tuple[str, ...]
    frees: tuple[str, ...]
    writes: tuple[str, ...]  # those of `reads` that are written in place
    border: str  # why the piece begins where it does
    key: str  # structural hash: equal keys, equal work
    source: str  # the model line of its first node
    nodes: int
    body: GraphModule = field(repr=False, compare=False)
    sizes: tuple[str, ...] = ()  # the symbols its work depends on, in order of appearance: ("u0", "u3")
    uncapturable: str | None = None  # why no CUDA graph can hold it; None where one can
    stream: int = 0  # 0 is the caller's


@dataclass(frozen=True)
class Buffer:
    """The memory behind a value of the plan. `born` and `dies` are indices of pieces; -1 is before the first."""

    name: str
    spec: str  # "bf16[u0, 4, 5120]"
    owner: str  # "caller"; "runtime" for inputs that are copied into static buffers; the piece that allocates it
    born: int
    dies: int  # the last piece that uses the memory, through this value or one that views it; len(pieces) if returned
    bytes: str  # over the symbols: "40960*u0"
    views: tuple[str, ...] = ()  # values whose memory it may be (a part of); () where it has its own


START, END = "start", "end"  # the caller's stream before the first piece, and after the last


@dataclass(frozen=True)
class Event:
    """Recorded on the stream of piece `after` once it is issued, waited for on that of `before` ahead of it."""

    after: str  # a piece, or START
    before: str  # a piece issued later, or END


@dataclass(frozen=True)
class Plan:
    """The whole program. `values` says what each name is; `outputs` are names, or constants handed out as they are."""

    inputs: tuple[str, ...]
    outputs: tuple[str | int | float | bool | None, ...]
    values: dict[str, str]  # name -> "bf16[u0, 4, 5120]" or "int u0"
    pieces: tuple[Piece, ...]
    sizes: dict[str, str] = field(default_factory=dict)  # symbol of the inputs -> its name: {"u0": "rows"}
    buckets: dict[str, tuple[int, ...]] = field(default_factory=dict)  # name of a size -> the values it is padded to
    whole: dict[str, int] = field(default_factory=dict)  # name of a size -> up to which a step is captured whole
    buffers: dict[str, Buffer] = field(default_factory=dict)  # one for every tensor of `values`
    events: tuple[Event, ...] = ()  # none where all pieces are on one stream
    pays_at: tuple[int, ...] = ()  # of a plan with side streams: numbers of rows for which it beats the one without
    overlapped: Plan | None = None  # the same program with work on side streams, where it pays; see `sides`
    rebuilt: tuple[int, ...] = ()  # outputs handed to nobody: AOTAutograd returns a view of an input of their layout
    groups: tuple[str, ...] = ()  # names of the process groups that it speaks to, in order of first use
    collectives: tuple[str, ...] = ()  # what it says to them, in order (passes/analysis/collectives.py)

    @property
    def keys(self) -> dict[str, list[str]]:
        """Key -> names of the pieces that share its artifact, both in order of appearance."""
        shared: dict[str, list[str]] = {}
        for piece in self.pieces:
            shared.setdefault(piece.key, []).append(piece.name)
        return shared

    @property
    def sides(self) -> tuple[Plan, ...]:
        """The plans with side streams, each for the numbers of rows in its `pays_at`, of which no two share one."""
        return (self.overlapped, *self.overlapped.sides) if self.overlapped else ()

    def border(self, index: int) -> tuple[str, ...]:
        """Names of the values that live between piece `index - 1` and piece `index`, in order of their making."""
        made = [*self.inputs, *(name for piece in self.pieces[:index] for name in piece.returns)]
        read = {name for piece in self.pieces[index:] for name in piece.reads}
        read.update(name for name in self.outputs if isinstance(name, str))
        return tuple(name for name in made if name in read)

    def names_of(self, piece: Piece) -> tuple[str, ...]:
        """What the sizes of `piece` are called, each once."""
        return tuple(dict.fromkeys(self.sizes.get(symbol, symbol) for symbol in piece.sizes))

    def without_bodies(self) -> Plan:
        """The plan as data alone: no ATen graph, no fake tensor."""
        overlapped = self.overlapped and self.overlapped.without_bodies()
        pieces = tuple(replace(piece, body=_no_body()) for piece in self.pieces)
        return replace(self, pieces=pieces, overlapped=overlapped)

    def to_json(self) -> str:
        """The plan without its bodies, stable from run to run."""
        return json.dumps(_facts(self), default=_facts, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """What `to_json` wrote, without bodies. PlanUnreadable where that is something else."""
        try:
            return _plan(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanUnreadable("Plan.from_json", reason=f"{type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        first = {key: names[0] for key, names in self.keys.items()}
        heads = ("piece", "artifact", "nodes", "reads", "returns", "writes", "sizes", "capture", "begins", "source")
        rows = [(heads[0], "stream", *heads[1:]), *(self._row(piece, first) for piece in self.pieces)]
        if not any(piece.stream for piece in self.pieces):
            rows = [(row[0], *row[2:]) for row in rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += [f"event from {event.after} to {event.before}" for event in self.events]
        return "\n".join(line.rstrip() for line in lines)

    def _row(self, piece: Piece, first: dict[str, str]) -> tuple[str, ...]:
        return (
            piece.name,
            str(piece.stream),
            piece.key[:8] if first[piece.key] == piece.name else f"= {first[piece.key]}",
            str(piece.nodes),
            str(len(piece.reads)),
            _few([f"{name} {self.values[name]}" for name in piece.returns]),
            _few(piece.writes),
            ", ".join(self.names_of(piece)) or "-",
            piece.uncapturable or "yes",
            piece.border,
            piece.source,
        )


def _plan(facts: dict[str, Any]) -> Plan:
    return Plan(
        **_tuples(facts, but=("pieces", "buckets", "buffers", "events", "overlapped")),
        pieces=tuple(Piece(**_tuples(piece), body=_no_body()) for piece in facts["pieces"]),
        buckets={name: tuple(rungs) for name, rungs in facts["buckets"].items()},
        buffers={name: Buffer(**_tuples(buffer)) for name, buffer in facts["buffers"].items()},
        events=tuple(Event(**event) for event in facts["events"]),
        overlapped=facts["overlapped"] and _plan(facts["overlapped"]),
    )


def _no_body() -> GraphModule:
    return cast(GraphModule, NotKept())


def _facts(thing: object) -> dict[str, object]:
    """The fields of a Plan, or of a part of one, but for its body."""
    return {each.name: getattr(thing, each.name) for each in fields(thing) if each.name != "body"}  # type: ignore[arg-type]


def _tuples(facts: dict[str, Any], but: Sequence[str] = ()) -> dict[str, Any]:
    """`facts` with tuples for lists, as they were before they were written."""
    return {name: tuple(each) if isinstance(each, list) else each for name, each in facts.items() if name not in but}


def _few(names: Sequence[str], most: int = 3) -> str:
    """A cell: the first names, and how many more there are; "-" for none."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more]) or "-"
