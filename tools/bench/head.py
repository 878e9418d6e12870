"""bench head: logits of bf16 rows and bf16 weights, summed in fp32, on this GPU: ours against what else would do it.

    ours       v41::product: a kernel that adds parts of a sum as it goes
    parts      the library: the sums of all parts, then their sum
    whole      the library: each sum in one go on the tensor cores, which cut what they add
    fp32       eager: both factors widened, on the fp32 units

µs, TB/s of the weights, error against fp64 of some columns; of ours also whether a row has the same bits alone and in
every batch. Exits with 1 where ours is further off than 1.5 times eager, or a row's bits hang on the batch.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from v41.errors import BenchNeedsGPU
from v41.lowering.long_products import by_library
from v41.lowering.narrow_products import product_on_gpu
from v41.tools.bench import timing

COLUMNS, TERMS = 129280, 5120
COMPARED = 4096  # columns, drawn, that are computed in fp64, too
LIMIT = 1.5  # of eager's error
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ours": product_on_gpu,
    "parts": by_library,
    "whole": partial(torch.mm, out_dtype=torch.float32),
    "fp32": lambda a, b: a.float() @ b.float(),
}


@torch.no_grad()
def records(rows: list[int]) -> Iterator[dict[str, Any]]:
    made = torch.Generator("cuda").manual_seed(0)
    weights = torch.empty(COLUMNS, TERMS, dtype=torch.bfloat16, device="cuda").normal_(std=TERMS**-0.5, generator=made)
    x = torch.randn(max(rows), TERMS, device="cuda", generator=made).bfloat16()
    some = torch.randperm(COLUMNS, device="cuda", generator=made)[:COMPARED]
    truth = x.double() @ weights[some].double().mT
    alone = product_on_gpu(x[:1], weights.mT)
    for count in rows:
        for way, call in WAYS.items():
            found = call(x[:count], weights.mT)
            error = (found[:, some].double() - truth[:count]).square().mean().sqrt() / truth[
                :count
            ].square().mean().sqrt()
            us = timing.microseconds(call, [(x[:count], weights.mT)] * 2, replays=10)
            record = {"rows": count, "way": way, "us": round(us, 1), "tb_s": round(weights.nbytes / us * 1e-6, 3),
                      "error": error.item()}  # fmt: skip
            yield record | ({"a row as alone": torch.equal(found[:1], alone)} if way == "ours" else {})


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench head` does; 1 where ours is wrong."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench head", found="torch sees no CUDA device")
    started = time.perf_counter()
    result: dict[str, Any] = {"case": "head", **timing.provenance(), "columns": COLUMNS, "terms": TERMS, "records": []}
    for record in records(arguments.rows):
        print(record, flush=True)
        result["records"].append(record)
        result["seconds"] = round(time.perf_counter() - started, 1)
        path = timing.save(result, arguments.out)
    print(f"written to {path}")
    return 0 if right(result["records"]) else 1


def right(found: list[dict[str, Any]]) -> bool:
    errors = {(record["rows"], record["way"]): record["error"] for record in found}
    near = (error <= LIMIT * errors[rows, "fp32"] for (rows, way), error in errors.items() if way == "ours")
    return all(near) and all(record.get("a row as alone", True) for record in found)
