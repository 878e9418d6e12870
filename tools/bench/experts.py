"""bench experts: the grouped products of routed experts at released widths on this GPU, ours against the library's.

    v41 bench experts               us, TB/s of the weights touched, error against fp64; table and JSON
    v41 bench experts tune          us of several tiles

    bf16       GROUPS experts, what one of four GPUs holds: the library, our kernel
    packed     all PACKED_GROUPS as they are released, e2m1 codes and a scale each 32: our kernel

Each token picks K experts at random. Weights of one product are 2.2 GB and picks change from call to call, so what is
read lies in no cache.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from v41.errors import BenchNeedsGPU
from v41.lowering import grouped_products, packed_products
from v41.lowering.grouped_products import MEAN, grouped_by_library
from v41.model_def.moe import expert_ends
from v41.model_def.quantization import GROUP, dequantize_mxfp4
from v41.tools.bench import timing

GROUPS, PACKED_GROUPS, PICKS = 96, 384, 6
SHAPES = {"up": (2304, 5120), "down": (5120, 2304)}  # columns, terms
SETS = 8  # of picks: those of one token are 38 MB of packed weights, and a cache holds 50
TILES = [grouped_products.Tiles(0, *each)
         for each in ((64, 64, 6), (64, 128, 4), (64, 128, 3), (128, 64, 5), (128, 128, 3), (64, 64, 4))]  # fmt: skip
PACKED_TILES = [  # columns, stages, warps; terms a tile
    (each, step) for step in (64, 128)
    for each in ((64, 3, 4), (64, 5, 4), (64, 4, 8), (128, 3, 8), (128, 5, 8))]  # fmt: skip
Call = Callable[[Tensor, Tensor], Tensor]  # of rows in the model's order, and ends


@dataclass(frozen=True)
class Weights:
    """Of one product, `stored` as they lie; `expert` decodes those of one."""

    name: str
    groups: int
    stored: tuple[Tensor, ...]
    expert: Callable[[int], Tensor]

    @property
    def bytes_each(self) -> int:
        return sum(each[0].numel() * each.element_size() for each in self.stored)


def bf16(name: str) -> Weights:
    columns, terms = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    made = torch.empty(GROUPS, columns, terms, dtype=torch.bfloat16, device="cuda")
    made.normal_(std=terms**-0.5, generator=generator)
    return Weights(name, GROUPS, (made,), made.__getitem__)


def packed(name: str) -> Weights:
    columns, terms = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(least: int, most: int, count: int) -> Tensor:
        sizes = (PACKED_GROUPS, columns, count)
        return torch.randint(least, most, sizes, generator=generator, dtype=torch.uint8, device="cuda")

    pairs, scales = drawn(0, 256, terms // 2), drawn(116, 122, terms // GROUP)
    return Weights(name, PACKED_GROUPS, (pairs, scales), lambda e: dequantize_mxfp4(pairs[e], scales[e]))


def routed(tokens: int, groups: int, terms: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, and where each expert's end."""
    generator = torch.Generator("cuda").manual_seed(seed)
    picks = torch.rand(tokens, groups, device="cuda", generator=generator).topk(PICKS).indices.flatten().sort().values
    x = torch.randn(tokens * PICKS, terms, device="cuda", generator=generator).bfloat16()
    return x, expert_ends(picks, groups)


def ways(weights: Weights, tokens: int, tune: bool) -> Iterator[tuple[str, int, Call]]:
    """Contenders, by name: terms of a tile in whose order they take rows (0: the model's), and a callable."""
    rows, terms = tokens * PICKS, SHAPES[weights.name][1]

    def grouped(x: Tensor, ends: Tensor, tiles: grouped_products.Tiles | None) -> Tensor:
        return grouped_products.launch(x, weights.stored[0], ends, tiles)

    def packed(x: Tensor, ends: Tensor, step: int, tiles: packed_products.Tiles | None) -> Tensor:
        pairs, scales = weights.stored
        return packed_products.launch(x, pairs, scales, ends, step, tiles)

    if len(weights.stored) == 1:
        yield "library", 0, lambda x, ends: grouped_by_library(x, weights.stored[0], ends)
        yield "ours", 0, partial(grouped, tiles=None)
        height = grouped_products.tiles_for(rows, weights.groups).rows
        for tiles in TILES if tune else ():
            chosen = grouped_products.Tiles(height, tiles.columns, tiles.terms, tiles.stages)
            yield str(chosen), 0, partial(grouped, tiles=chosen)
        return
    step = packed_products.step_of(terms)
    yield "packed", step, partial(packed, step=step, tiles=None)
    height = packed_products.tiles_for(rows, weights.groups).rows
    for each, step in PACKED_TILES if tune else ():
        made = packed_products.Tiles(height, *each)
        yield f"{made} of {step}", step, partial(packed, step=step, tiles=made)


@torch.no_grad()
def measured(weights: Weights, tokens: int, tune: bool) -> Iterator[dict[str, Any]]:
    """A record a contender."""
    drawn = [routed(tokens, weights.groups, SHAPES[weights.name][1], seed) for seed in range(SETS)]
    sizes = [ends.diff(prepend=ends.new_zeros(1)) for _, ends in drawn]
    parts = drawn[0][0].split(sizes[0].tolist())
    truth = torch.cat([rows.double() @ weights.expert(e).double().mT for e, rows in enumerate(parts) if len(rows)])
    touched = sum((each > 0).sum().item() for each in sizes) / len(sizes)
    for name, step, call in ways(weights, tokens, tune):
        record: dict[str, Any] = {"contender": name, "product": weights.name, "tokens": tokens}
        sets = [(packed_products.ordered(x, step) if step else x, ends) for x, ends in drawn]
        try:
            found = call(*sets[0])
            same = all(torch.equal(call(*sets[0]), found) for _ in range(5))
            us = timing.microseconds(call, sets)
        except Exception as problem:
            yield record | {"failed": str(problem)[:200]}
            continue
        error = ((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()).item()
        moved, columns, terms = touched * weights.bytes_each, *SHAPES[weights.name]
        yield record | {
            "us": round(us, 2), "tb_s": round(moved / us * 1e-6, 3), "error": error, "the same every time": same,
            "tflop_s": round(2 * tokens * PICKS * columns * terms / us * 1e-6, 1),
        }  # fmt: skip


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench experts` does; 1 where ours is wrong."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench experts", found="torch sees no CUDA device")
    started = time.perf_counter()
    result: dict[str, Any] = {"case": f"experts {arguments.mode}", **timing.provenance(), "groups": GROUPS,
                              "packed groups": PACKED_GROUPS, "picks": PICKS, "most rows a group": MEAN,
                              "records": []}  # fmt: skip
    for kind in arguments.weights:
        for name in SHAPES:
            weights = {"bf16": bf16, "packed": packed}[kind](name)
            for tokens in arguments.rows:
                for record in measured(weights, tokens, arguments.mode == "tune"):
                    print(record, flush=True)
                    result["records"].append(record)
                result["seconds"] = round(time.perf_counter() - started, 1)
                path = timing.save(result, arguments.out)
            del weights
    print(f"written to {path}")
    return 0 if all(map(right, result["records"])) else 1


def right(record: dict[str, Any]) -> bool:
    """Of a record of ours: no further from fp64 than one ulp of bf16, and the same bits each time."""
    return "failed" not in record and record["error"] <= 2.0**-8 and record["the same every time"]
