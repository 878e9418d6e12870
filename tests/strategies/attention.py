"""Attention over a window and picked entries in many spellings, and near misses of it, as plain functions to trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.mhc import drawn_like
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD, MXFP4_RECORD, Record
from v41.passes.turns import turn

ROWS = 5
PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "einsum": (lambda q, k: torch.einsum("thd,tkd->thk", q, k), lambda p, k: torch.einsum("thk,tkd->thd", p, k)),
    "matmul": (lambda q, k: q @ k.mT, lambda p, k: p @ k),
    "bmm of the transposed": (lambda q, k: torch.bmm(k, q.mT).mT, lambda p, k: torch.bmm(k.mT, p.mT).mT),
}
HIDES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # scores [T, H, K], visible [T, K]
    "masked_fill": lambda s, seen: s.masked_fill(~seen.unsqueeze(1), -torch.inf),
    "where": lambda s, seen: torch.where(seen[:, None], s, -torch.inf),
    "added": lambda s, seen: s + torch.where(seen, 0.0, -torch.inf)[:, None],
    "a large number": lambda s, seen: s.masked_fill(~seen.unsqueeze(1), -1e30),
}
SOFTMAXES = ("exp", "exp below the sink", "exp of max", "softmax", "softmax, sink first", "divided first")
RECORDS: dict[str, tuple[Record | None, Record | None]] = {  # of window keys and of picked entries
    "both": (FP8_RECORD, FP4_RECORD),
    "all fp8": (FP8_RECORD, FP8_RECORD),
    "mxfp4": (FP8_RECORD, MXFP4_RECORD),
    "window": (FP8_RECORD, None),
    "none": (None, None),
}
OTHER = "it is a softmax of scaled scores, hidden keys left out, a sink in the total"
ROUNDED = "scores and sums are fp32, and p is rounded for the values alone"
READS = "it reads queries, one or two branches of keys with a mask each, and a sink"
FLAWS = {  # the rule it breaks; the first of each rule is tried in every run
    "values of their own": "the keys are the values, one latent for all heads",
    "as many keys as rows": "all sizes but that of the rows are numbers",
    "one mask for both": READS,
    "a bias": READS,
    "a total of rounded p": ROUNDED,
    "rounded scores": ROUNDED,
    "bf16 throughout": ROUNDED,
    "p rounded twice": ROUNDED,
    "scaled after the softmax": OTHER,
    "no max": OTHER,
    "a sink in half": OTHER,
    "scores have bounds": OTHER,
    "hidden by a number in reach": OTHER,
    "turned back by another table": "the output turns back by what turned the queries",
    "RoPE in bf16": "RoPE is fp32, rounded once",
    "p is returned": "only its output is read outside",
    "keys seen by their queries": "only its output is read outside",
}


def by_stack(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, channels: str) -> Tensor:
    """As the plain model turns."""
    return turn(x.float(), cos.unsqueeze(1), sin.unsqueeze(1), pairs, channels).to(x.dtype)


def by_slices(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, channels: str) -> Tensor:
    """Only what turns is cast, and each half of the pairs is cut for itself."""
    width, (cos, sin) = 2 * cos.shape[-1], (table[:, None] for table in (cos, sin))
    cut = (lambda x: x[..., -width:]) if channels == "last" else (lambda x: x[..., :width])
    kept = x[..., :-width] if channels == "last" else x[..., width:]
    a, b = (cut(x)[..., 0::2], cut(x)[..., 1::2]) if pairs == "adjacent" else cut(x).chunk(2, -1)
    a, b = a.float(), b.float()
    both = (cos * a - sin * b).to(x.dtype), (cos * b + sin * a).to(x.dtype)
    turned = torch.stack(both, -1).flatten(-2) if pairs == "adjacent" else torch.cat(both, -1)
    return torch.cat((kept, turned) if channels == "last" else (turned, kept), -1)


def in_bf16(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, channels: str) -> Tensor:
    return turn(x, cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype), pairs, channels)


ROPES = {"stack": by_stack, "slices": by_slices}


@dataclass(frozen=True)
class Spelling:
    """How one attention is written, and its sizes. The region must say all of them."""

    product: str = "einsum"
    hide: str = "masked_fill"
    softmax: str = "exp"
    scaled: str = "scores"  # or "queries"
    zeroed: str = "together"  # hidden keys set to 0: "together", "each branch" or "not"
    mask: str = "visible"  # or "hidden": what the mask of the window says
    rope: str = "stack"  # of ROPES, or "none"
    pairs: str = "adjacent"
    channels: str = "last"
    records: str = "both"
    picked: int | None = 3
    sink: bool = True
    rounded: bool = True  # p, to bf16
    turned_back: bool = True
    heads: int = 2
    width: int = 32
    rotary: int = 8
    window: int = 4
    flaw: str = ""

    # ---- what goes in

    def to_trace(self) -> tuple[Callable[..., Any], list[Tensor], list[Tensor]]:
        """The function, its rows, its weights."""
        width = self.width
        tables = [torch.randn(ROWS, self.rotary // 2) for _ in range(3)]
        window = self.stored(self.formats[0], torch.randn(ROWS, self.window, width).bfloat16())
        rows = [torch.randn(ROWS, self.heads, width).bfloat16(), *tables, window, torch.rand(ROWS, self.window) < 0.5]
        if self.picked is not None:
            rows.append(self.stored(self.formats[1], torch.randn(ROWS, self.picked, width).bfloat16()))
            rows.append(torch.randint(-1, 9, (ROWS, self.picked)))
        return self.attention, rows, [torch.randn(self.heads)]

    @property
    def formats(self) -> tuple[Record | None, Record | None]:
        return RECORDS[self.records]

    @staticmethod
    def stored(record: Record | None, keys: Tensor) -> Tensor:
        return keys if record is None else record.encode(keys)

    # ---- the function

    def attention(self, q: Tensor, cos: Tensor, sin: Tensor, other: Tensor, *rest: Tensor) -> Any:
        *rows, sink = rest
        q = self.turn(q, cos, sin)
        keys, visible = self.read(q, rows)
        p, o = self.attend(q, keys, visible, sink, other)
        table = other if self.flaw == "turned back by another table" else cos
        o = self.turn(o, table, -sin) if self.turned_back else o
        return (o, p) if self.flaw == "p is returned" else o.flatten(1)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.rope == "none":
            return x
        rotate = in_bf16 if self.flaw == "RoPE in bf16" else ROPES[self.rope]
        return rotate(x, cos, sin, self.pairs, self.channels)

    def read(self, q: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """All keys [T, K, D], and which are seen [T, K]."""
        if self.flaw == "as many keys as rows":
            at = torch.arange(q.shape[0])
            return rows[0][:, 0].expand(q.shape[0], -1, -1), at[:, None] >= at
        read, seen = [], [~rows[1] if self.mask == "hidden" else rows[1], *(picks >= 0 for picks in rows[3:])]
        if self.flaw == "keys seen by their queries":
            seen[0] = seen[0] & (q.sum(1)[:, :1] > 0)
        for record, stored, visible in zip(self.formats, rows[::2], seen, strict=False):
            keys = stored if record is None else record.decode(stored)
            read.append(torch.where(visible[..., None], keys, 0) if self.zeroed == "each branch" else keys)
        keys, visible = torch.cat(read, 1), torch.cat(seen, 1)
        if self.flaw == "one mask for both":
            visible = drawn_like(visible)
        if self.zeroed == "together":
            keys = keys.masked_fill(~visible.unsqueeze(-1), 0)
        return keys, visible

    def attend(self, q: Tensor, keys: Tensor, seen: Tensor, sink: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """P, and the output before it turns back."""
        match, read = PRODUCTS[self.product]
        dtype, scale = q.dtype, q.shape[-1] ** -0.5
        if self.flaw != "bf16 throughout":
            q, keys = q.float(), keys.float()
        late = self.flaw == "scaled after the softmax"
        scores = match(q * scale, keys) if self.scaled == "queries" and not late else match(q, keys)
        if self.scaled == "scores" and not late:
            scores = scores * scale
        if self.flaw == "a bias":
            scores = scores + other[:, :1, None]
        if self.flaw == "rounded scores":
            scores = scores.to(dtype).float()
        if self.flaw == "scores have bounds":
            scores = scores.clamp(-30, 30)
        hidden = HIDES[self.hide](scores, seen)
        if self.flaw == "hidden by a number in reach":
            hidden = scores.masked_fill(~seen.unsqueeze(1), -1e4)
        p, total = self.soft(hidden, sink)
        p = p * scale if late else p
        rounded = p.half() if self.flaw == "p rounded twice" else p
        rounded = rounded.to(dtype) if self.rounded else rounded
        if self.flaw == "a total of rounded p":
            total = rounded.float().sum(-1, keepdim=True)
        values = keys.sin() if self.flaw == "values of their own" else keys
        o = read(rounded.to(values.dtype), values)
        return p, (o if total is None else o / total).to(dtype)

    def soft(self, scores: Tensor, sink: Tensor) -> tuple[Tensor, Tensor | None]:
        """P, and what the output is still to be divided by."""
        column = sink[:, None].expand(scores.shape[0], -1, -1)
        if self.softmax.startswith("softmax"):
            if not self.sink:
                return scores.softmax(-1), None
            if self.softmax == "softmax":
                return torch.cat((scores, column), -1).softmax(-1)[..., :-1], None
            return torch.cat((column, scores), -1).softmax(-1)[..., 1:], None
        top = scores.max(-1, keepdim=True).values if self.softmax == "exp of max" else scores.amax(-1, keepdim=True)
        if self.softmax == "exp below the sink" and self.sink:
            top = torch.maximum(top, column)
        top = top.clamp(min=-1e30)
        top = torch.zeros_like(top) if self.flaw == "no max" else top
        p = (scores - top).exp()
        total = p.sum(-1, keepdim=True)
        of_sink = (column - top).exp() * (0.5 if self.flaw == "a sink in half" else 1.0)
        total = total + of_sink if self.sink else total
        return (p / total, None) if self.softmax == "divided first" else (p, total)

    # ---- what the region must say

    @property
    def over(self) -> str:
        if self.softmax.startswith("softmax") or self.softmax == "divided first":
            return "total"
        return "max_and_sink" if self.softmax == "exp below the sink" and self.sink else "max"

    @property
    def empty(self) -> str:
        """What a row gets that sees no key."""
        if self.sink:
            return "zero"
        mean = "other" if self.zeroed == "not" else "zero"  # of the hidden keys, which are 0 then
        return mean if self.hide == "a large number" else "nan"

    @property
    def keys(self) -> tuple[object, ...]:
        """Of each branch, what the region must say."""
        names: dict[Record | None, tuple[str, str]] = {
            FP8_RECORD: ("e4m3", "ue8m0"), FP4_RECORD: ("e2m1", "e4m3"), MXFP4_RECORD: ("e2m1", "ue8m0")
        }  # fmt: skip
        used = self.formats[: 1 if self.picked is None else 2]
        return tuple("as_is" if f is None else (*names[f], f.group, f.size(self.width)) for f in used)


legal = st.builds(
    Spelling,
    st.sampled_from(sorted(PRODUCTS)),
    st.sampled_from(sorted(HIDES)),
    st.sampled_from(SOFTMAXES),
    st.sampled_from(("scores", "queries")),
    st.sampled_from(("together", "each branch", "not")),
    st.sampled_from(("visible", "hidden")),
    st.sampled_from((*sorted(ROPES), "none")),
    st.sampled_from(("adjacent", "halves")),
    st.sampled_from(("last", "first")),
    st.sampled_from(sorted(RECORDS)),
    st.sampled_from((None, 2, 5)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from((32, 64)),
    st.sampled_from((4, 32)),
    st.integers(2, 5),
)
SMALL = Spelling("matmul", zeroed="not", rope="none", records="none", picked=None)  # little to trace


def with_flaw(flaw: str) -> Spelling:
    """SMALL with what the flaw needs."""
    turned = flaw in ("RoPE in bf16", "turned back by another table", "keys seen by their queries")
    picked = 3 if flaw == "one mask for both" else None
    return replace(SMALL, flaw=flaw, rope="stack" if turned else "none", picked=picked)


# "as many keys as rows" is not drawn: torch itself asserts a row in it, and 0 are tried
flawed = st.sampled_from(sorted(FLAWS.keys() - {"as many keys as rows"})).map(with_flaw)


def together(spellings: Sequence[Spelling]) -> tuple[Callable[..., Any], list[Tensor], list[Tensor]]:
    """All in one function, its rows and weights. Rows of one shape and type are shared: inputs are slow to trace."""
    parts, rows, places = [spelling.to_trace() for spelling in spellings], list[Tensor](), list[list[int]]()
    for _, own, _ in parts:
        taken: list[int] = []
        for row in own:
            fits = (i for i, known in enumerate(rows) if (known.shape, known.dtype) == (row.shape, row.dtype))
            place = next((i for i in fits if i not in taken), len(rows))
            rows += [row] * (place == len(rows))
            taken.append(place)
        places.append(taken)

    def run(*given: Tensor) -> Any:
        sinks = given[len(rows) :]
        each = zip(parts, places, sinks, strict=True)
        return [fn(*(given[i] for i in taken), sink) for (fn, _, _), taken, sink in each]

    return run, rows, [sink for _, _, (sink,) in parts]
