"""bench experts: the grouped products of routed experts at released widths on this GPU, ours against the library's.

    v41 bench experts               us, TB/s of the weights touched, error against fp64; table and JSON
    v41 bench experts tune          us of several tiles

Each token picks K of GROUPS experts at random. Weights of one product are 2.2 GB, so they never lie in a cache.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from v41.errors import BenchNeedsGPU
from v41.lowering.grouped_products import MEAN, Tiles, grouped_by_library, launch, tiles_for
from v41.model_def.moe import expert_ends
from v41.tools.bench import timing

GROUPS, PICKS = 96, 6
SHAPES = {"up": (2304, 5120), "down": (5120, 2304)}  # columns, terms
TILES = [
    Tiles(0, *each) for each in ((64, 64, 6), (64, 128, 4), (64, 128, 3), (128, 64, 5), (128, 128, 3), (64, 64, 4))
]
LIMIT = 1.5  # of the library's error


def weights_of(name: str) -> Tensor:
    columns, terms = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    made = torch.empty(GROUPS, columns, terms, dtype=torch.bfloat16, device="cuda")
    return made.normal_(std=terms**-0.5, generator=generator)


def routed(tokens: int, terms: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, and where each expert's end."""
    generator = torch.Generator("cuda").manual_seed(seed)
    picks = torch.rand(tokens, GROUPS, device="cuda", generator=generator).topk(PICKS).indices.flatten().sort().values
    x = torch.randn(tokens * PICKS, terms, device="cuda", generator=generator).bfloat16()
    return x, expert_ends(picks, GROUPS)


@torch.no_grad()
def measure(name: str, weights: Tensor, tokens: int, call: Callable[..., Tensor]) -> dict[str, Any]:
    x, ends = routed(tokens, weights.shape[2])
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(x.split(sizes), weights, strict=True)
    truth = torch.cat([rows.double() @ each.double().mT for rows, each in parts if len(rows)])
    found = call(x, weights, ends)
    same = all(torch.equal(call(x, weights, ends), found) for _ in range(5))
    sets = [(x, weights, ends), *((a, weights, b) for a, b in [routed(tokens, weights.shape[2], 1)])]
    us = timing.microseconds(call, sets)
    touched = sum((each.diff(prepend=each.new_zeros(1)) > 0).sum().item() for *_, each in sets) / len(sets)
    moved = touched * weights[0].numel() * weights.element_size()
    error = ((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()).item()
    return {"product": name, "tokens": tokens, "us": round(us, 2), "tb_s": round(moved / us * 1e-6, 3), "error": error,
            "the same every time": same}  # fmt: skip


def bench(names: list[int], tune: bool) -> Iterator[dict[str, Any]]:
    for name in SHAPES:
        weights = weights_of(name)
        for tokens in names:
            ways: dict[str, Callable[..., Tensor]] = {"library": grouped_by_library, "ours": launch}
            rows = tiles_for(tokens * PICKS, GROUPS).rows
            for tiles in TILES if tune else ():
                chosen = Tiles(rows, tiles.columns, tiles.terms, tiles.stages)
                ways[str(chosen)] = lambda x, w, e, chosen=chosen: launch(x, w, e, chosen)
            for way, call in ways.items():
                try:
                    yield {"contender": way, **measure(name, weights, tokens, call)}
                except Exception as error:
                    yield {"contender": way, "product": name, "tokens": tokens, "failed": str(error)[:200]}
        del weights


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench experts` does; 1 where ours is wrong."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench experts", found="torch sees no CUDA device")
    started = time.perf_counter()
    result: dict[str, Any] = {"case": f"experts {arguments.mode}", **timing.provenance(), "groups": GROUPS,
                              "picks": PICKS, "most rows a group": MEAN, "records": []}  # fmt: skip
    for record in bench(arguments.rows, arguments.mode == "tune"):
        print(record, flush=True)
        result["records"].append(record)
        result["seconds"] = round(time.perf_counter() - started, 1)
        path = timing.save(result, arguments.out)
    print(f"written to {path}")
    return 0 if all(map(right, result["records"])) else 1


def right(record: dict[str, Any]) -> bool:
    """Of a record of ours: no further from fp64 than one ulp of bf16, and the same bits each time."""
    return "failed" not in record and record["error"] <= 2.0**-8 and record["the same every time"]
