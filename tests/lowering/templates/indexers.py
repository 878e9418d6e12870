"""Indexers of any sizes: their kernels, inputs of a step, and what the plain model makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests.lowering.templates.launched import interpret
from tests.triton_interpreter import Interpreter
from v41.lowering.templates.index_scores import Form, IndexKernel, Spread, kernel_of
from v41.lowering.templates.index_scores.launch import SCORES
from v41.model_def.indexer import ascending_picks, candidate_mask, entries_of, index_scores
from v41.model_def.quantization import MXFP4_RECORD, fake_quant_mxfp4

OPERANDS = ("queries", "weights", "cache", "positions", "requests", "columns", "rows", "slots", "blocks")


class Inputs(NamedTuple):
    """As a kernel takes them; `given` only where it is asked for."""

    queries: Tensor  # [T, H, d]
    weights: Tensor  # [T, H]
    cache: Tensor  # [slots, capacity, bytes]
    positions: Tensor
    requests: Tensor
    columns: Tensor
    rows: Tensor  # [R, Q]
    slots: Tensor
    blocks: Tensor
    given: Tensor | None = None

    @property
    def arguments(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]

    def of_row(self, row: int) -> Inputs:
        """A step of this row alone."""
        one = slice(row, row + 1)
        read = self.rows[self.requests[row], self.columns[row]]
        own = self.slots[self.requests[one]]
        given = None if self.given is None else self.given[one]
        zero = torch.zeros(1, dtype=torch.int64)
        queries, weights = self.queries[read][None], self.weights[read][None]
        return Inputs(
            queries, weights, self.cache, self.positions[one], zero, zero, zero[None], own, self.blocks, given
        )


@dataclass(frozen=True)
class Case:
    """given: "", "candidates" or "candidate_blocks"."""

    heads: int = 4
    width: int = 32
    k: int = 5
    ratio: int = 1
    block: int = 4
    keep: int = 0
    given: str = ""
    kept: tuple[str, ...] = ("kept",)  # how it hands over what it keeps
    capacity: int = 61

    @property
    def keeps(self) -> bool:
        return bool(self.keep) and not self.given

    @property
    def scale(self) -> float:
        return 0.125  # a power of two rounds nothing, so that sums of small integers are exact

    @property
    def form(self) -> Form:
        kept = (self.block, self.keep) if self.keep else (0, 0)
        outputs = (*self.kept, "picks") if self.keeps else ("picks",)
        return Form(self.heads, self.width, self.scale, self.k, self.ratio, self.block, self.capacity - 1, self.given,
                    *kept, outputs)  # fmt: skip

    @property
    def kernel(self) -> IndexKernel:
        return kernel_of(self.form, (*OPERANDS, self.given) if self.given else OPERANDS)

    def inputs(self, chunks: Sequence[tuple[int, int]], pads: int = 0, seed: int = 0, exact: bool = True) -> Inputs:
        """chunks: (first position, rows) of each request, whose slots lie anyhow. exact: no sum is ever rounded."""
        draw = torch.Generator().manual_seed(seed)
        positions = [start + i for start, count in chunks for i in range(count)]
        places = [(request, i) for request, (_, count) in enumerate(chunks) for i in range(count)]
        count, slots = len(places) + pads, torch.randperm(len(chunks) + 1, generator=draw)[: len(chunks)]
        first = torch.tensor([0, *(n for _, n in chunks)]).cumsum(0)[:-1]
        most = max((start + n) // self.ratio for start, n in chunks)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=draw)

        queries, weights = normal(count, self.heads, self.width).bfloat16(), normal(count, self.heads).bfloat16()
        if exact:
            queries, weights = queries.round().clamp(-6, 6), torch.ones_like(weights).copysign(weights)
        keys = normal(len(chunks) + 1, self.capacity, self.width)
        keys = keys.round() if exact else keys
        found = Inputs(
            fake_quant_mxfp4(queries),
            weights,
            MXFP4_RECORD.encode(keys.bfloat16()),
            torch.tensor([*positions, *[-1] * pads]),
            torch.tensor([*(r for r, _ in places), *[0] * pads]),
            torch.tensor([*(i for _, i in places), *[0] * pads]),
            (first[:, None] + torch.arange(max(n for _, n in chunks))).clamp(max=count - 1),
            slots,
            torch.arange(-(-most // self.block) + 1),
        )
        kept = torch.rand(count, len(found.blocks), generator=draw) < 0.5
        if self.given == "candidates":
            return found._replace(given=kept.repeat_interleave(self.block, 1))
        if self.given == "candidate_blocks":
            number = torch.where(kept, torch.arange(kept.shape[1]), 2**40).sort(1).values
            return found._replace(given=torch.where(number < 2**40, number, -1))
        return found

    def scores(self, given: Inputs, kind: torch.dtype = torch.float32) -> Tensor:
        """[T, E] as the model computes them, or in fp64; hidden ones -inf."""
        entries = entries_of(given.blocks, self.block)
        keys = MXFP4_RECORD.decode(given.cache[given.slots[:, None], entries.clamp(max=self.capacity - 1)])
        weights = given.weights.float() * self.scale
        if kind is torch.float64:
            x = torch.einsum("rqhd,red->rqhe", given.queries[given.rows].double(), keys.double()).relu()
            scores = (x * weights[given.rows].double().unsqueeze(-1)).sum(2)
        else:
            scores = index_scores(given.queries[given.rows], keys, weights[given.rows])
        scores = scores[given.requests, given.columns]
        hidden = entries >= self.seen(given)[:, None]
        if given.given is not None:
            hidden = hidden | ~self.candidates(given)
        return scores.masked_fill(hidden, -torch.inf)

    def seen(self, given: Inputs) -> Tensor:
        return (given.positions + 1) // self.ratio

    def candidates(self, given: Inputs) -> Tensor:
        """[T, E]"""
        assert given.given is not None
        if self.given == "candidates":
            return given.given
        blocks = len(given.blocks)
        marks = torch.zeros(len(given.given), blocks + 1, dtype=torch.bool)
        marks.scatter_(1, torch.where(given.given < 0, blocks, given.given), True)
        return marks[:, :blocks].repeat_interleave(self.block, 1)

    def eager(self, given: Inputs) -> dict[str, Tensor]:
        scores = self.scores(given)
        padded = torch.nn.functional.pad(scores, (0, self.k), value=-torch.inf)  # the model wants k entries
        found = {"picks": ascending_picks(padded, self.k)}
        if self.keeps:
            kept = candidate_mask(scores, self.seen(given), self.keep, self.block)[:, :: self.block]
            number = torch.where(kept, torch.arange(kept.shape[1]), 2**40).sort(1).values[:, : self.keep]
            found |= {"kept": kept, "kept_blocks": torch.where(number < 2**40, number, -1)}
        return {name: found[name] for name in self.form.outputs}

    def run(
        self, interpreter: Interpreter, given: Inputs, spread: Spread | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Outputs by name, and the scores, of what is listed where there is a list. All are poisoned before."""
        kernel = self.kernel
        steps, outputs = kernel.steps(given.arguments, spread)
        scores = steps[0].arguments[SCORES] if steps and steps[0].kernel.startswith("scores") else torch.empty(0)
        made = dict(zip(kernel.form.outputs, outputs, strict=True))
        made["picks"].fill_(77)
        scores.fill_(7.0)
        interpret(interpreter, kernel, steps)
        return made, scores
