"""Look-ups by hashed n-grams and gates of residual streams in many spellings, and near misses, as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.mhc import drawn_like
from v41.model_def.quantization import dequantize_fp8, fake_quant_fp8, quantize_fp8

TABLE, VOCABULARY, WIDTH = 50, 40, 32
EFFECT = "nothing is written in between, and no effect reads it there"
READ = "only its result is read outside"
HASHED = "each hash is the xor of the first ids, multiplied"
GATED = "the gate is the sigmoid of the signed root of the normed product of streams and keys"
LOOKUP_FLAWS = {  # what is wrong -> the rule it breaks
    "a hash adds": HASHED,
    "a hash skips a slot": HASHED,
    "scales have another last bit": "a row is stored as it is or in groups of fp8",
    "row numbers are returned": READ,
    "a draw of rows in between": EFFECT,
}
GATE_FLAWS = {
    "a root without a sign": GATED,
    "zero has a sign": GATED,
    "keys are not normed": GATED,
    "the gate is squared": GATED,
    "a rounded gate": "nothing is rounded before the streams are",
    "the gate is returned": READ,
}


@dataclass(frozen=True)
class Lookup:
    """How one look-up is written. multipliers: one a slot."""

    multipliers: tuple[int, ...] = (9007, 123457, 77)
    heads: int = 2
    take: str = "embedding"  # "index_select"
    hashes: str = "stacked"  # "by order": each its own remainder's columns
    stored: str = "fp8/32"  # "bfloat16"
    quantised: bool = False
    width: int = WIDTH
    flaw: str = ""

    def tensors(self) -> list[Tensor]:
        """ids [T, N], the map of tokens, primes and offsets, a table and its scales, a matrix."""
        orders = len(self.multipliers) - 1
        primes = torch.arange(7, 7 + orders * self.heads).view(orders, self.heads)
        values, scale = quantize_fp8(torch.randn(TABLE, self.width))
        table = values if self.stored != "bfloat16" else torch.randn(TABLE, self.width).bfloat16()
        ids = torch.randint(-1, VOCABULARY, (5, orders + 1))
        matrix = torch.randn(orders * self.heads * self.width, 8).bfloat16()
        return [ids, torch.arange(VOCABULARY) % 17, primes, primes * 2, table, scale, matrix]

    def run(self, ids: Tensor, known: Tensor, primes: Tensor, offsets: Tensor, table: Tensor, scale: Tensor,
            matrix: Tensor) -> list[Tensor]:  # fmt: skip
        c = torch.where((ids >= 0).cumprod(1) > 0, known[ids.clamp(min=0)], known[2])
        rows = (self.hash(c).unsqueeze(-1) % primes + offsets).flatten(1)
        got = self.rows(rows, table, scale)
        out = [rows] if self.flaw == "row numbers are returned" else []
        if self.flaw == "a draw of rows in between":
            out, got = [drawn_like(got)], fake_quant_fp8(got)
        got = fake_quant_fp8(got) if self.quantised else got
        return [*out, got @ matrix]

    def hash(self, c: Tensor) -> Tensor:
        first, *others = self.multipliers
        h, hashes = c[:, 0] * first, []
        for s, mu in enumerate(others, 1):
            if self.flaw == "a hash adds" and s == 1:
                h = h ^ c[:, s] * mu ^ (c[:, s] * c[:, 0])
            elif self.flaw == "a hash skips a slot" and s == 1:
                hashes.append(h ^ c[:, 2] * mu)
                h = h ^ c[:, 1] * mu
                continue
            else:
                h = h ^ mu * c[:, s]
            hashes.append(h)
        return torch.stack(hashes, 1) if self.hashes == "stacked" else torch.cat([h[:, None] for h in hashes], -1)

    def rows(self, rows: Tensor, table: Tensor, scale: Tensor) -> Tensor:
        take = F.embedding if self.take == "embedding" else _selected
        if self.stored == "bfloat16":
            return take(rows, table).flatten(1)
        data, byte = take(rows, table.view(torch.uint8)), take(rows, scale)
        return dequantize_fp8(data, byte ^ 1 if self.flaw == "scales have another last bit" else byte).flatten(1)


def _selected(rows: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, rows.flatten()).view(rows.shape[0], rows.shape[1], table.shape[1])


def _sign(d: Tensor, floor: float) -> Tensor:
    return d.sign() * d.abs().clamp(min=floor).sqrt()


def _sign_last(d: Tensor, floor: float) -> Tensor:
    return d.abs().clamp_min(floor) ** 0.5 * torch.sgn(d)


def _dot(X: Tensor, w: Tensor, key: Tensor, eps: float) -> Tensor:
    norms = (X.square().mean(-1) + eps).rsqrt() * (key.square().mean(-1) + eps).rsqrt()
    return (X * w * key).sum(-1) * norms


def _normed_first(X: Tensor, w: Tensor, key: Tensor, eps: float) -> Tensor:
    X, key = (each * (each.pow(2).mean(-1, keepdim=True) + eps).rsqrt() for each in (X, key))
    return torch.einsum("tsd,tsd->ts", X * w, key)


ROOTS: dict[str, Callable[[Tensor, float], Tensor]] = {"sign": _sign, "sign last": _sign_last}
DOTS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {"sum": _dot, "einsum": _normed_first}
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "where": lambda there, gate: torch.where(there, gate, 0.0),
    "product": lambda there, gate: gate * there.float(),
    "none": lambda there, gate: gate,
}


@dataclass(frozen=True)
class Gate:
    """How one gate is written."""

    root: str = "sign"
    dot: str = "sum"
    mask: str = "where"
    eps: float = 1e-20
    floor: float = 1e-6
    scale: float = WIDTH**-0.5
    streams: int = 3
    width: int = WIDTH
    flaw: str = ""

    def tensors(self) -> list[Tensor]:
        """Streams, what keys and value are cut from, ids; two weights, a matrix."""
        X, kv = (torch.randn(5, count, self.width).bfloat16() for count in (self.streams, self.streams + 1))
        return [X, kv, torch.randint(-1, 3, (5, 2)), *torch.rand(2, self.streams, self.width).bfloat16()]

    def run(self, X: Tensor, kv: Tensor, ids: Tensor, q: Tensor, k: Tensor) -> list[Tensor]:
        key, value = kv.split((self.streams, 1), 1)
        x, w = X.float(), q.float() * k.float()
        dot = DOTS[self.dot](x, w, key.float(), self.eps) * self.scale
        if self.flaw == "keys are not normed":
            dot = (x * w * key.float()).sum(-1) * (x.square().mean(-1) + self.eps).rsqrt() * self.scale
        match self.flaw:
            case "a root without a sign":
                root = dot.abs().clamp(min=self.floor).sqrt()
            case "zero has a sign":
                root = torch.copysign(dot.abs().clamp(min=self.floor).sqrt(), dot)
            case _:
                root = ROOTS[self.root](dot, self.floor)
        gate = MASKS[self.mask](ids[:, :1] >= 0, torch.sigmoid(root))
        gate = gate * gate if self.flaw == "the gate is squared" else gate
        gate = gate.bfloat16().float() if self.flaw == "a rounded gate" else gate
        out = [gate] if self.flaw == "the gate is returned" else []
        return [*out, (x + gate.unsqueeze(-1) * value.float()).to(X.dtype)]


Part = Lookup | Gate


def together(parts: Sequence[Part]) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """One function of all `parts`, and what it takes."""
    tensors = [part.tensors() for part in parts]

    def run(*given: Tensor) -> list[Tensor]:
        results, at = [], 0
        for part, own in zip(parts, tensors, strict=True):
            results += part.run(*given[at : at + len(own)])
            at += len(own)
        return results

    return run, [tensor for own in tensors for tensor in own]


legal_lookups = st.builds(
    Lookup,
    st.sampled_from([(9007, 123457, 77), (2**40 + 1, 2**50 + 3), (5, 7, 11, 13)]),
    st.integers(1, 3),
    st.sampled_from(["embedding", "index_select"]),
    st.sampled_from(["stacked", "by order"]),
    st.sampled_from(["fp8/32", "bfloat16"]),
    st.booleans(),
    st.sampled_from([32, 64]),
)
legal_gates = st.builds(
    Gate,
    st.sampled_from(sorted(ROOTS)),
    st.sampled_from(sorted(DOTS)),
    st.sampled_from(sorted(MASKS)),
    st.sampled_from([1e-20, 1e-6]),
    st.sampled_from([1e-6, 1e-3]),
    st.sampled_from([WIDTH**-0.5, 0.25]),
    st.integers(2, 4),
    st.sampled_from([32, 24]),
)
flawed_lookups = st.builds(
    lambda lookup, flaw: replace(lookup, flaw=flaw, stored="fp8/32", multipliers=(9007, 123457, 77)),
    legal_lookups,
    st.sampled_from(sorted(LOOKUP_FLAWS)),
)
flawed_gates = st.builds(
    lambda gate, flaw: replace(gate, flaw=flaw), legal_gates, st.sampled_from(sorted(GATE_FLAWS))
)
