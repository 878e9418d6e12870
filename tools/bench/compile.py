"""bench compile: what capturing a model costs, cut after so many layers: processor seconds by phase, and peak memory.

    v41 bench compile --layers 10 20 40      each in a process of its own, on tensors without storage, with no cache

It is what `v41 inspect` does, from the start of Python to the report. Phases are told in seconds of processor time,
user and system, since others may use the machine, and end where the next begins; wall_seconds are those of the whole
process. Needs no GPU.
"""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import time
from argparse import Namespace
from typing import Any

from rich.console import Console

from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.bench import timing
from v41.tools.inspect import capture_call, first_layers, step_of
from v41.tools.inspect_command import show_inspection
from v41.tools.run import run_of

Record = dict[str, Any]


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench compile` does; 1 where a pass failed."""
    result: Record = {
        "case": "compile", **timing.provenance(), "preset": arguments.preset, "codegen": arguments.codegen,
        "cores": len(os.sched_getaffinity(0)), "records": [],
    }  # fmt: skip
    for layers in arguments.layers:
        record = measured(arguments.preset, layers, arguments.codegen)
        result["records"].append(record)
        path = timing.save(result, arguments.out)
        print("  ".join(f"{name} {record[name]}" for name in ("layers", "cpu_seconds", "wall_seconds", "peak_mib")))
        print("  ".join(f"{name} {seconds}" for name, seconds in record["phases"].items()), flush=True)
    print(f"written to {path}")
    return int(any(record["failures"] for record in result["records"]))


def measured(preset: str, layers: int, codegen: str) -> Record:
    """One capture in a process of its own."""
    start, this = time.perf_counter(), [sys.executable, "-m", "v41.tools.bench.compile"]
    done = subprocess.run([*this, preset, str(layers), codegen], stdout=subprocess.PIPE, text=True, check=True)
    record: Record = json.loads(done.stdout)
    return record | {"wall_seconds": round(time.perf_counter() - start, 1)}


class Phases:
    """Processor seconds of what goes on, from the start of the process."""

    def __init__(self, first: str) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._start = first, 0.0

    def begin(self, name: str) -> None:
        now = time.process_time()
        self.seconds[self._name] = round(self.seconds.get(self._name, 0.0) + now - self._start, 2)
        self._name, self._start = name, now


def capture(preset: str, layers: int, codegen: str) -> Record:
    """What this process spends from its start to the report of the first `layers` layers of `preset`."""
    phases = Phases("imports")
    config = first_layers(V41Config.preset(preset), layers)
    made = capture_call(lambda: step_of(lambda: V41ForCausalLM(config)), codegen=codegen, told=phases.begin)
    phases.begin("report")
    show_inspection(Console(file=io.StringIO(), width=100), run_of(made, f"preset {preset}"))
    phases.begin("end")
    passes = made.report.passes
    return {
        "layers": config.num_hidden_layers,
        "phases": phases.seconds,
        "cpu_seconds": round(time.process_time(), 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "nodes": [passes[0].nodes_before, passes[-1].nodes_after],
        "pieces": len(made.plan.pieces),
        "artifacts": len(made.plan.keys),
        "failures": [f"{run.name}: {run.failure}" for run in passes if run.failure],
    }


if __name__ == "__main__":
    print(json.dumps(capture(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
