"""bench head and bench sorts: what is called right, and that both need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from v41.errors import BenchNeedsGPU
from v41.tools.bench import head, sorts
from v41.tools.bench.head import WAYS, right
from v41.tools.cli import parser

OURS = {"rows": 16, "way": "ours", "error": 3.0, "a row as alone": True}
EAGER = {"rows": 16, "way": "fp32", "error": 2.0}


@pytest.mark.parametrize(
    ("change", "expected"), [({}, True), ({"error": 3.1}, False), ({"a row as alone": False}, False)]
)
def test_ours_is_right_as_near_as_eager_and_as_a_row_alone(change: dict[str, Any], expected: bool) -> None:
    others = [
        {"rows": rows, "way": way, "error": 9.0} for rows in (16, 64) for way in WAYS if way not in ("ours", "fp32")
    ]
    assert right([{**OURS, **change}, *others, EAGER, {**EAGER, "rows": 64, "error": 1.0}]) is expected


@pytest.mark.parametrize(("name", "bench"), [("head", head), ("sorts", sorts)])
def test_it_needs_a_gpu(name: str, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = parser().parse_args(["bench", name, "--rows", "16"])
    assert arguments.rows == [16]
    with pytest.raises(BenchNeedsGPU, match=f"v41 bench {name}"):
        bench.bench_command(arguments)
