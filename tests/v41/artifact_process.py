"""One process of test_artifacts.py: compiles a step, runs it, prints what it computed and what the cache said."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

import v41
from v41.report import CompileReport


def step(cache: Tensor, x: Tensor, slots: Tensor) -> tuple[Any, ...]:
    """[8, 4], [rows, 4], [rows]: a write in place, kernels that stay whole, a constant, a view, an input, a size."""
    cache[slots + 1] = x * 2.5
    y = x.softmax(-1) + torch.tensor([1.0, 2.0, 3.0, 4.0])
    return cache.sum(0) + y, y[:, 1], x, x.shape[0]


def arguments(rows: int, name: str = "rows") -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    slots = torch.arange(rows)
    for value in (x, slots):
        torch._dynamo.decorators.mark_unbacked(value, 0, shape_id=name)
    return torch.zeros(8, 4), x, slots


def run(codegen: str, sizes: tuple[int, ...] = (3,)) -> tuple[CompileReport, list[Any]]:
    """The report of the one compile, and for each size everything the step returned and left in its arguments."""
    function = torch.compile(step, backend="v41", fullgraph=True, options={"codegen": codegen})
    results = []
    with torch.no_grad(), v41.collect() as reports:
        for rows in sizes:
            given = arguments(rows)
            results.append((function(*given), given))
    (report,) = reports
    return report, results


def plain(results: list[Any]) -> list[Any]:
    """As json writes it; floats keep their bits."""
    return torch.utils._pytree.tree_map(lambda v: v.tolist() if isinstance(v, Tensor) else v, results)


if __name__ == "__main__":
    report, results = run(sys.argv[1])
    print(json.dumps({"cache": report.cache, "results": plain(results)}))
