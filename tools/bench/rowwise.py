"""bench rowwise: generated kernels of the row-wise work between products, against eager and torch.compile, on this GPU.

    v41 bench rowwise                                us of every contender, errors, launches by origin; table and JSON
    v41 bench rowwise check                          values, the same bits in any batch, NaN rows, no race
    v41 bench rowwise tune --cases router --rows 1   us of many ways to spread the rows, and of each launch
    v41 bench rowwise pairs --seed 3                 ten (case, rows): reckoned at most 1.5 times the fastest

torch.compile gets static shapes and reorder_for_locality off. Inputs are taken in turn from sets that exceed the L2
cache twice, or from 64 of them: rows that a kernel before has just written do lie there. One that fails is recorded
with its error; those that would start after --budget seconds are left out, as the JSON says.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from v41.lowering.rowwise import Kernel, hold, pass_over
from v41.tools.bench import modes, seam, timing, tuning
from v41.tools.bench.boundary import COPY_BYTES_A_US, table
from v41.tools.bench.rivals import INDUCTOR, Call, alike, attempted, compiled
from v41.tools.bench.rowwise_cases import CASES, Case
from v41.tools.bench.tuning import input_sets, kernel_of

FLIPS = 0.005  # of quantised values: where a last bit tips a rounding
REPEATS = 50


# ---- bench


def contenders(case: Case) -> dict[str, Callable[[int], Call]]:
    """By name: what makes a callable for a number of rows. Both kinds of kernel, where both can read the body."""

    found: dict[str, Callable[[int], Call]] = {"generated": lambda rows: kernel_of(case.name).launch}
    for name, way in (("held", hold), ("passes", pass_over)):
        found[name] = lambda rows, way=way: way(case.body(), case.name).launch  # type: ignore[misc]
    found["eager"] = lambda rows: case.fn
    return found | {name: lambda rows, each=each: compiled(case.fn, each) for name, each in INDUCTOR.items()}


def bench(cases: Sequence[Case], rows_list: Sequence[int], names: Sequence[str], deadline: float) -> Iterator[Any]:
    """One record a case, number of rows and contender, the slow compilers last."""
    for name in names:
        for case in cases:
            made: dict[str, Call] = {}
            for rows in rows_list:
                record: dict[str, Any] = {"case": case.name, "contender": name, "rows": rows}
                yield attempted(record, deadline, partial(made_and_measured, made, name, case, rows))


def made_and_measured(made: dict[str, Call], name: str, case: Case, rows: int) -> dict[str, Any]:
    """made: what serves all numbers of rows, once it is there."""
    if name in INDUCTOR or name not in made:
        made[name] = contenders(case)[name](rows)
    return measure(made[name], case, rows)


@torch.no_grad()
def measure(call: Call, case: Case, rows: int) -> dict[str, Any]:
    sets = input_sets(case, rows)
    started = time.perf_counter()
    results = as_tuple(call(*sets[0]))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    us = timing.microseconds(call, sets)
    moved = sum(t.numel() * t.element_size() for t in (*sets[0], *results))
    return {
        "us": round(us, 2), "floor_us": round(moved / COPY_BYTES_A_US, 2), "sets": len(sets),
        "errors": errors(case, sets[0], results), "compile_seconds": round(seconds, 1),
        "origin": timing.launches(lambda: call(*sets[0]), case.name),
    }  # fmt: skip


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def errors(case: Case, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> list[float]:
    """Of each output: RMS error against fp64 over the RMS, or where bytes and picks are made, the share that is not
    eager's."""
    theirs = as_tuple(case.fn(*inputs))
    if all(t.is_floating_point() for t in theirs) and not case.quantises:
        return seam.errors(results, seam.oracle(case.body().cuda(), inputs))
    return [differing(a, b) for a, b in zip(results, theirs, strict=True)]


def differing(a: Tensor, b: Tensor) -> float:
    """The share of elements that differ by more than last bits."""
    near = torch.isclose(a.double(), b.double(), rtol=2.0**-7 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-30)
    return 1 - near.double().mean().item()


# ---- check


def check(case: Case) -> dict[str, Any]:
    """Every claim about a kernel's results, as figures and booleans."""
    kernel, report = kernel_of(case.name), dict[str, Any]()
    arguments = case.inputs(4096, "cuda", 9)
    whole = kernel.launch(*arguments)
    report["kind"] = type(kernel).__name__
    report["errors"] = errors(case, arguments, whole)
    eager = errors(case, arguments, as_tuple(case.fn(*arguments)))
    limits = [limit(case, result, error) for result, error in zip(whole, eager, strict=True)]
    report["right"] = all(ours <= most for ours, most in zip(report["errors"], limits, strict=True))
    report["same bits in every batch"] = {str(rows): alike(kernel.launch(*first(case, arguments, rows)), whole, rows)
                                          for rows in (1, 2, 5, 16, 17, 64, 100, 256, 1000)}  # fmt: skip
    report["NaN rows harm no other"] = nan_rows(kernel, case)
    report["the same in a graph, read by the next kernel"] = in_a_graph(kernel, case)
    again = [(rows, first(case, arguments, rows)) for rows in (1, 16, 300) for _ in range(REPEATS)]
    report["the same every time"] = all(alike(kernel.launch(*part), whole, rows) for rows, part in again)
    return report


def limit(case: Case, result: Tensor, eager: float) -> float:
    """The largest error that is right: 1.5 times eager's, or one ulp."""
    ulp = 2.0**-8 if result.dtype == torch.bfloat16 else 2.0**-22
    return FLIPS if case.quantises else max(1.5 * eager, ulp)


def first(case: Case, arguments: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The first rows alone, where they lie."""
    return [arg[:rows] if i < case.per_row else arg for i, arg in enumerate(arguments)]


def nan_rows(kernel: Kernel, case: Case) -> bool:
    """Every third row NaN: the others keep their bits."""
    fine = True
    for rows in (3, 48, 300):
        arguments = case.inputs(rows, "cuda", 3)
        clean = kernel.launch(*arguments)
        bad = torch.arange(rows, device="cuda") % 3 == 1
        dirty = [arg.clone() if i < case.per_row else arg for i, arg in enumerate(arguments)]
        for tensor in dirty[: case.per_row]:
            tensor[bad] = float("nan")
        results = kernel.launch(*first_like(arguments, dirty))
        fine &= all(torch.equal(a[~bad], b[~bad]) for a, b in zip(clean, results, strict=True))
    return fine


def in_a_graph(kernel: Kernel, case: Case) -> bool:
    """Launches one behind the other in a captured graph, each result read at once by an ordinary kernel."""
    fine = True
    for rows in (1, 16, 300):
        arguments = case.inputs(rows, "cuda", 5)
        plain, graph = kernel.launch(*arguments), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            kept = [tuple(tensor.clone() for tensor in kernel.launch(*arguments)) for _ in range(8)]
        for _ in range(REPEATS):
            for tensor in (tensor for each in kept for tensor in each):
                tensor.zero_()
            graph.replay()
            fine &= all(alike(each, plain, rows) for each in kept)
    return fine


def first_like(arguments: Sequence[Tensor], dirty: Sequence[Tensor]) -> list[Tensor]:
    """`dirty`, lying in memory as `arguments` do."""
    return [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(b)
            for a, b in zip(arguments, dirty, strict=True)]  # fmt: skip


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench rowwise` does; 1 where a check fails, or a drawn pair is too slow by reckoning."""
    cases, pairs = [CASES[name] for name in arguments.cases], list[modes.Record]()

    def tuned(deadline: float) -> Iterator[Any]:
        asked = [(name, rows) for name in arguments.cases for rows in arguments.rows]
        yield from tuning.tune(asked, arguments.workers, deadline)

    def drawn(deadline: float) -> Iterator[Any]:
        for record in tuning.tune(tuning.drawn_pairs(arguments.seed), arguments.workers, deadline):
            pairs.append(record)
            yield record
        yield {"seed": arguments.seed, "pairs": tuning.verdicts(pairs)}

    timed = {
        "bench": lambda deadline: bench(cases, arguments.rows, arguments.contenders, deadline),
        "tune": tuned,
        "pairs": drawn,
    }
    code = modes.run(arguments, "rowwise", lambda: {case.name: check(case) for case in cases}, timed, tables)
    if arguments.mode == "pairs":
        print(tuning.table(pairs))
    return code or int(not all(each["within"] for each in tuning.verdicts(pairs)))


def tables(records: list[dict[str, Any]]) -> str:
    """A table a case."""
    names = dict.fromkeys(record["case"] for record in records)
    return "\n\n".join(f"{name}\n{table([each for each in records if each['case'] == name])}" for name in names)
