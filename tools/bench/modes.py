"""modes: what the benches of kernels have in common: check, or records that are printed and written as they come.

    v41 bench NAME [bench|check|tune]      the JSON is written after every record: one that is cut short keeps its own
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from v41.errors import BenchNeedsGPU
from v41.tools.bench import timing

Record = dict[str, Any]
SILENT = ("origin", "sets")  # facts of a record that its line leaves out


def run(
    arguments: Namespace,
    name: str,
    check: Callable[[], dict[str, Any]],
    timed: Mapping[str, Callable[[float], Iterable[Record]]],
    table: Callable[[list[Record]], str],
) -> int:
    """What `v41 bench NAME` does; 1 where a check fails. `timed`: the records of a mode, until a deadline."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU(f"v41 bench {name}", found="torch sees no CUDA device")
    started, mode = time.perf_counter(), arguments.mode
    result: dict[str, Any] = {"case": f"{name} {mode}", **timing.provenance(),
                              "options": {"reorder_for_locality": False, "dynamic": False}}  # fmt: skip

    def save() -> Path:
        result["seconds"] = round(time.perf_counter() - started, 1)
        return timing.save(result, arguments.out)

    fine = True
    if mode == "check":
        result["checks"] = check()
        fine = holds(result["checks"])
        print(json.dumps(result["checks"], indent=1), "all hold" if fine else "SOME DO NOT HOLD", sep="\n")
    else:
        records: list[Record] = result.setdefault("records", [])
        for record in timed[mode](started + arguments.budget):
            print(json.dumps({k: v for k, v in record.items() if k not in SILENT}), flush=True)
            records.append(record)
            save()
        if mode == "bench":
            print(table(records))
    print(f"written to {save()}")
    return 0 if fine else 1


def holds(checks: dict[str, Any]) -> bool:
    """Whether every boolean in `checks`, at any depth, is true."""
    return all(holds(value) if isinstance(value, dict) else value is not False for value in checks.values())
