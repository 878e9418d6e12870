"""Run by test_ahead.py where nothing interprets kernels: compiles what calls would launch on a GPU of sm_90 that is not
there, then asks Triton for what they do launch. Prints JSON: functions compiled ahead, and those compiled after it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime import driver
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from tests.lowering.templates.indexers import Case
from tests.lowering.templates.regions import inputs_of, kernel_of, piece
from tests.strategies.attention import Spelling
from v41.lowering.ahead import compile_ahead
from v41.lowering.generated import GeneratedPiece
from v41.lowering.gpu import as_on
from v41.lowering.rowwise import Kernel, hold, pass_over
from v41.tools.bench.rowwise_cases import cases

CUDA = torch.device("cuda", 0)
TARGET = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)


def calls(rows: int) -> Iterator[tuple[Kernel, list[Any]]]:
    """A kernel of each kind, and inputs of so many rows."""
    known = cases(20)
    for name, way in (("norm_rope_fp8", hold), ("norm", pass_over)):
        yield way(known[name].body(), name), list(known[name].inputs(rows, "cpu"))
    spelling = Spelling(window=3, picked=5, heads=2, width=64)
    yield kernel_of(spelling), inputs_of(piece(spelling), spelling, rows)
    case = Case()
    yield case.kernel, case.inputs([(20, 1)] * rows).arguments


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of what Triton compiles."""
    found = list[str]()
    with mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: found.append(told["fn"].name)):
        yield found


def launched(function: JITFunction, *args: Any, grid: Any, **named: Any) -> None:
    function.run(*args, grid=grid, warmup=True, **named)


if __name__ == "__main__":
    driver.set_active(TARGET)
    patches = [
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        mock.patch.object(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)),
        mock.patch.object(torch.cuda, "get_device_name", lambda device: "a GPU"),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        mock.patch.object(
            JITFunction, "__getitem__", lambda self, grid: lambda *a, **k: launched(self, *a, grid=grid, **k)
        ),
    ]
    for each in patches:
        each.start()
    with as_on("sm_90"):
        asked = [(kernel, given) for rows in map(int, sys.argv[1:]) for kernel, given in calls(rows)]
        with counted() as ahead:
            compile_ahead([(GeneratedPiece(kernel, None), given, {}) for kernel, given in asked], CUDA)
        with counted() as after:
            for kernel, given in asked:
                kernel.launch(*given)
    print(json.dumps({"ahead": ahead, "after": after}))
