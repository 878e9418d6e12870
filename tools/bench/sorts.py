"""bench sorts: picks of experts in order of experts on this GPU, ours against the library's stable sort.

µs of both at so many tokens, six picks each; exits with 1 where ours is another order.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from v41.errors import BenchNeedsGPU
from v41.lowering.short_sorts import sort_by_library, sort_on_gpu
from v41.tools.bench import timing

EXPERTS, PICKS = 384, 6


def records(tokens: list[int]) -> Iterator[dict[str, Any]]:
    made = torch.Generator("cuda").manual_seed(0)
    for count in tokens:
        sets = [(torch.randint(0, EXPERTS, (count * PICKS,), device="cuda", generator=made),) for _ in range(4)]
        ours, library = (partial(way, descending=False) for way in (sort_on_gpu, sort_by_library))
        same = all(all(map(torch.equal, ours(*keys), library(*keys))) for keys in sets)
        us = {
            f"{name} us": round(timing.microseconds(way, sets), 2)
            for name, way in (("ours", ours), ("library", library))
        }
        yield {"tokens": count, "keys": count * PICKS, **us, "same": same}


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench sorts` does; 1 where ours is wrong."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench sorts", found="torch sees no CUDA device")
    started = time.perf_counter()
    result: dict[str, Any] = {"case": "sorts", **timing.provenance(), "experts": EXPERTS, "records": []}
    for record in records(arguments.rows):
        print(record, flush=True)
        result["records"].append(record)
        result["seconds"] = round(time.perf_counter() - started, 1)
        path = timing.save(result, arguments.out)
    print(f"written to {path}")
    return 0 if all(record["same"] for record in result["records"]) else 1
