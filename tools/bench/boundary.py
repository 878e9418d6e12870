"""bench boundary: the generated kernel of the mHC boundary against eager, torch.compile and max-autotune, on this GPU.

    v41 bench boundary                       us of every contender; a table, and JSON with all that it depends on
    v41 bench boundary check                 right, same bits in every bucket, NaN rows harmless, no race
    v41 bench boundary tune --rows 1 16      us of many schedules, and by reckoning against the best

Contenders get what a user can give them: reorder_for_locality off, and of static and dynamic shapes the faster. One
that fails is recorded with its error. Those that would start after --budget seconds are left out, as the JSON says.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41.errors import BenchNeedsGPU
from v41.lowering.rowwise import GeneratedKernel, pass_over
from v41.tools.bench import seam, timing, tuning
from v41.tools.bench.modes import holds

POOLED = 64  # rows at least, over which an RMS error is taken
REPEATS, REPEATED = 200, (1, 16, 256, 2048)  # times, and row counts
BYTES_A_ROW = 2 * (2 * seam.STREAMS + 2) * seam.WIDTH + 2 * 4 * (2 * seam.STREAMS + seam.STREAMS**2)
WEIGHT_BYTES = 4 * seam.STREAMS * (seam.STREAMS + 2) * (seam.STREAMS * seam.WIDTH + 1) + 2 * seam.WIDTH
COPY_BYTES_A_US = 4.2e6


def kernel_of() -> GeneratedKernel:
    return pass_over(seam.capture(), "boundary")


def input_sets(rows: int) -> list[tuple[Tensor, ...]]:
    """Inputs that together exceed the L2 cache twice."""
    count = timing.sets_needed(BYTES_A_ROW * rows + WEIGHT_BYTES)
    return [seam.inputs(rows, "cuda", seed) for seed in range(count)]


# ---- check


def check(kernel: GeneratedKernel) -> dict[str, Any]:
    """Every claim about the kernel's results, as figures and booleans."""
    body, report = seam.capture(), dict[str, Any]()
    for rows in (1, 2, 3, 16, 65, 256, 1024, 4096):
        batches = [seam.inputs(rows, "cuda", seed) for seed in range(max(POOLED // rows, 1))]
        truth = joined([seam.oracle(body.cuda(), batch) for batch in batches])
        ours = seam.errors(joined([kernel.launch(*batch) for batch in batches]), truth)
        eager = seam.errors(joined([seam.plain(*batch) for batch in batches]), truth)
        report[f"errors at {rows}"] = {"generated": ours, "eager": eager, "right": within_contract(ours, eager, truth)}
        del truth
    report |= {"same bits in every bucket": same_bits(kernel), "NaN rows harm no other": nan_rows(kernel)}
    report[f"same bits {REPEATS} times at {', '.join(map(str, REPEATED))} rows"] = repeats(kernel)
    report["no rows, no launch"] = kernel.launch(*seam.inputs(0, "cuda"))[0].shape[0] == 0
    return report


def joined(results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each output's rows of all batches: an RMS over a handful of numbers says nothing."""
    return [torch.cat(list(column)) for column in zip(*results, strict=True)]


def within_contract(ours: Sequence[float], eager: Sequence[float], truth: Sequence[Tensor]) -> bool:
    """RMS error at most 1.5 times eager's, or one ulp of the output's type at its RMS."""
    ulps = [2.0**-8 if i < 2 else 2.0**-23 for i in range(len(truth))]
    return all(a <= max(1.5 * b, ulp) for a, b, ulp in zip(ours, eager, ulps, strict=True))


def same_bits(kernel: GeneratedKernel) -> dict[str, bool]:
    """The first rows of a batch of 4096, alone in smaller batches, with every bucket's schedule."""
    arguments = seam.inputs(4096, "cuda", seed=9)
    whole = kernel.launch(*arguments)
    found = {}
    for rows in (1, 2, 5, 16, 64, 100, 256, 1000, 2048):
        part = [arg[:rows].contiguous() if i < seam.ROW_INPUTS else arg for i, arg in enumerate(arguments)]
        found[str(rows)] = all(torch.equal(a, b[:rows]) for a, b in zip(kernel.launch(*part), whole, strict=True))
    return found


def nan_rows(kernel: GeneratedKernel) -> bool:
    """Every third row NaN: the others keep their bits."""
    fine = True
    for rows in (3, 48, 300, 4096):
        arguments = seam.inputs(rows, "cuda", seed=3)
        clean = kernel.launch(*arguments)
        bad = torch.arange(rows, device="cuda") % 3 == 1
        dirty = [arg.clone() if i < seam.ROW_INPUTS else arg for i, arg in enumerate(arguments)]
        for tensor in dirty[: seam.ROW_INPUTS]:
            tensor[bad] = float("nan")
        results = kernel.launch(*dirty)
        fine &= all(torch.equal(a[~bad], b[~bad]) for a, b in zip(clean, results, strict=True))
        fine &= bool(results[0][bad].isnan().all() and results[3][bad].isnan().all())
    return fine


def repeats(kernel: GeneratedKernel) -> bool:
    """A race would show as another result now and then."""
    fine = True
    for rows in REPEATED:
        arguments = seam.inputs(rows, "cuda", seed=rows)
        first = kernel.launch(*arguments)
        for _ in range(REPEATS):
            fine &= all(torch.equal(a, b) for a, b in zip(kernel.launch(*arguments), first, strict=True))
    return fine


# ---- bench


def contenders(kernel: GeneratedKernel) -> dict[str, Callable[[int], Callable[..., Any]]]:
    """By name: what makes a callable for a number of rows."""

    def compiled(dynamic: bool, **settings: Any) -> Callable[[int], Callable[..., Any]]:
        def make(rows: int) -> Callable[..., Any]:
            torch.compiler.reset()
            options = {"reorder_for_locality": False, **settings}
            call = torch.compile(seam.plain, options=options, dynamic=None if dynamic else False)
            for count in (7, 11, rows) if dynamic else (rows,):  # a second row count makes the rows symbolic
                call(*seam.inputs(count, "cuda"))
            return call

        return make

    tuned = {"max_autotune": True, "coordinate_descent_tuning": True}
    return {
        "generated": lambda rows: kernel.launch,
        "eager": lambda rows: seam.plain,
        "compile static": compiled(False),
        "compile dynamic": compiled(True),
        "max-autotune": compiled(False, **tuned),
    }


def bench(
    kernel: GeneratedKernel,
    rows_list: Sequence[int],
    deadline: float,
    records: list[dict[str, Any]],
    save: Callable[[], object],
) -> None:
    """One record a number of rows and contender, the slow compilers last; each saved at once."""
    sets = {rows: input_sets(rows) for rows in rows_list}
    truth = {rows: [t.cpu() for t in seam.oracle(seam.capture().cuda(), sets[rows][0])] for rows in rows_list}
    for name, make in contenders(kernel).items():
        for rows in (
            rows_list if name != "max-autotune" else sorted(rows_list, key=lambda r: (r not in (1, 4096, 16, 1024), r))
        ):
            record: dict[str, Any] = {"contender": name, "rows": rows}
            started = time.perf_counter()
            try:
                if started > deadline:
                    raise TimeoutError("left out: no time")
                record |= measure(make, rows, sets[rows], [t.cuda() for t in truth[rows]], kernel.name)
            except Exception as error:  # the record of a contender that fails is the result
                record["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            record["seconds"] = round(time.perf_counter() - started, 1)
            print(
                json.dumps(
                    {key: record[key] for key in ("contender", "rows", "us", "failed", "seconds") if key in record}
                ),
                flush=True,
            )
            records.append(record)
            save()


@torch.no_grad()
def measure(
    make: Callable[[int], Callable[..., Any]],
    rows: int,
    sets: Sequence[tuple[Tensor, ...]],
    truth: Sequence[Tensor],
    name: str,
) -> dict[str, Any]:
    started = time.perf_counter()
    call = make(rows)
    results = call(*sets[0])
    torch.cuda.synchronize()
    compile_seconds = time.perf_counter() - started
    found = seam.errors(results, truth)
    if not all(error < 0.05 for error in found):
        raise ValueError(f"wrong results: errors {found}")
    us = timing.microseconds(call, sets)
    floor = (BYTES_A_ROW * rows + WEIGHT_BYTES) / COPY_BYTES_A_US
    return {
        "us": round(us, 2), "floor_us": round(floor, 2), "errors": found, "compile_seconds": round(compile_seconds, 1),
        "origin": timing.launches(lambda: call(*sets[0]), name),
    }  # fmt: skip


def table(records: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(record["contender"] for record in records))
    rows_list = list(dict.fromkeys(sorted(record["rows"] for record in records)))
    us = {(r["rows"], r["contender"]): r.get("us") for r in records}
    lines = ["rows" + "".join(f"{name:>18}" for name in names) + f"{'best other / ours':>20}  (µs)"]
    for rows in rows_list:
        others = [t for n in names[1:] if n != "eager" and (t := us.get((rows, n)))]
        ours = us.get((rows, names[0]))
        ratio = f"{min(others) / ours:.2f}" if others and ours else "-"
        cells = "".join(f"{us.get((rows, n)) or '-':>18}" for n in names)
        lines.append(f"{rows:>4}{cells}{ratio:>20}")
    return "\n".join(lines)


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench boundary` does; 1 where a check fails."""
    if not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench boundary", found="torch sees no CUDA device")
    started = time.perf_counter()
    result: dict[str, Any] = {
        "case": f"boundary {arguments.mode}",
        "shape": [seam.STREAMS, seam.WIDTH],
        **timing.provenance(),
    }

    def save() -> Path:
        result["seconds"] = round(time.perf_counter() - started, 1)
        return timing.save(result, arguments.out)

    fine = True
    if arguments.mode == "tune":
        asked, records = [("boundary", rows) for rows in arguments.rows], result.setdefault("records", [])
        for record in tuning.tune(asked, arguments.workers, started + arguments.budget):
            print(json.dumps(record), flush=True)
            records.append(record)
            save()
        print(tuning.table(records))
    elif arguments.mode == "check":
        result["checks"] = check(kernel_of())
        fine = holds(result["checks"])
        print(json.dumps(result["checks"], indent=1), f"\n{'all hold' if fine else 'SOME DO NOT HOLD'}")
    else:
        kernel = kernel_of()
        schedules = {str(most): str(schedule) for most, schedule in kernel.schedules}
        result["options"] = {"reorder_for_locality": False, "schedules": schedules}
        bench(kernel, arguments.rows, started + arguments.budget, result.setdefault("records", []), save)
        print(table(result["records"]))
    print(f"written to {save()}")
    return 0 if fine else 1
