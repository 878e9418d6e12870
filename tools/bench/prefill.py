"""bench prefill: prompts read in chunks on this GPU, with late layers on all rows and on those read, in one run.

    off        replay off, trim_replay switched off: every layer runs on every row; the others are measured against it
    graphs     bounded replay (after_source), segments captured
    replay     the same program, nothing captured
    halo       replay off: late layers run on the rows that the exact result needs; segments captured, as in "off"

A case is a prompt of so many tokens in chunks, of which the last alone returns logits, or several requests in one step:
some read, some decode. us is the time of all its steps, CUDA events around them, median; kept is how many rows late
layers run on, of how many. The last step's logits are compared with eager's under the same switch, where eager fits
into memory: kl. Pieces that are alike in several contenders are compiled once. A contender that fails is a record with
its error. The JSON is written after every record; what would start after --budget seconds is left out, as it says. The
bench fails where "graphs" takes longer than "off": kept rows are never to cost more than they spare.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console

from v41._compat import without_passes
from v41.backend import shared_artifacts
from v41.model_def.batch import Batch, Chunk, batch_facts, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.chunk import is_late
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.report import CompileReport, collect
from v41.tools.bench import timing
from v41.tools.bench.models import config_of, device_of, facts_of, model_of
from v41.tools.bench.program import clean_up, free
from v41.tools.bench.program_cases import token_ids
from v41.tools.tables import add, table

CONTENDERS: dict[str, tuple[str, dict[str, Any], str]] = {  # replay, options, passes that are switched off
    "off": ("off", {}, "trim_replay"),
    "graphs": ("after_source", {}, ""),
    "replay": ("after_source", {"capture": "off"}, ""),
    "halo": ("off", {}, ""),
}
WARM = 3  # passes over a case before the first that counts: the second step of a size is captured
FEWEST, MOST, SECONDS = 3, 20, 1.0  # a time is the median of so many passes as fit
DECODING = 8  # requests that decode beside one that reads
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Steps one after another, and the chunks of each."""

    name: str
    tokens: int
    steps: tuple[tuple[Chunk, ...], ...]


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench prefill` does; 1 where a contender failed, its result is not eager's, or kept rows cost time."""
    started, device, config = time.perf_counter(), device_of(arguments, "v41 bench prefill"), config_of(arguments)
    timed, model = device != "cpu", model_of(config, arguments)
    cases = cases_of(config, arguments.tokens, arguments.chunk)
    cache = Cache.zeros(config, DECODING + 1, max(case.tokens for case in cases), device)
    result = {
        **facts_of("prefill", arguments, config), "chunk": arguments.chunk, "codegen": arguments.codegen,
        "contenders": dict[str, Any](), "records": list[Record](), "ratios": dict[str, Any](),
    }  # fmt: skip
    expected: dict[tuple[str, str], torch.Tensor | str] = {}
    with shared_artifacts():
        for name in arguments.contenders:
            replay, options, without = CONTENDERS[name]
            options = {"codegen": arguments.codegen, "cache": False, **options}  # it knows no passes that are off
            with switched(model, replay), without_passes(without), collect() as reports:
                compiled = torch.compile(model, backend="v41", fullgraph=True, options=options)
                for case in cases:
                    late = time.perf_counter() - started > arguments.budget
                    record = {"contender": name, "case": case.name, "tokens": case.tokens}
                    if late:
                        record["error"] = "left out: no time"
                    else:
                        record |= attempt(compiled, model, case, cache, timed)
                        found = record.pop("logits", None)
                        if found is not None:
                            truth = eager(model, case, cache, expected, replay)
                            record["kl"] = truth if isinstance(truth, str) else kl(truth, found)
                    result["records"].append(record)
                    result["contenders"][name] = [facts(report) for report in reports]
                    result["ratios"] = ratios(result["records"])
                    result["seconds"] = round(time.perf_counter() - started, 1)
                    path = timing.save(result, arguments.out)
                    print(line(record), flush=True)
                del compiled, reports
            clean_up()
    Console(width=160).print(overview(result["records"]))
    costly = slower(result["ratios"])
    for name in costly:
        print(f"slower than off: graphs  {name}")
    print(f"written to {path}")
    return 0 if all(map(holds, result["records"])) and not costly else 1


def holds(record: Record) -> bool:
    """Whether a contender ran, and gave eager's result where eager had one."""
    return "error" not in record and not (isinstance(record["kl"], float) and not record["kl"] <= 0.02)


def facts(report: CompileReport) -> dict[str, Any]:
    """What a compile says: was it trimmed, and are its steps captured?"""
    runs = {run.name: run for run in report.passes}
    captures = report.captures
    trimmed = runs.get("trim_replay")
    return {
        "pieces": report.pieces, "artifacts": report.artifacts, "fallbacks": report.fallbacks,
        "trimmed": trimmed.applied if trimmed else 0, "refused": trimmed.refused if trimmed else 0,
        "seconds": {name: round(value, 1) for name, value in report.seconds.items()},
        "captures": captures and {"captured": captures.captured, "segment_replays": captures.segment_replays,
                                  "replays": captures.replays, "piecewise": captures.piecewise,
                                  "uncaptured": captures.uncaptured, "dropped": captures.dropped,
                                  "errors": captures.errors, "pool_bytes": captures.pool_bytes()},
    }  # fmt: skip


def cases_of(config: V41Config, tokens: Sequence[int], chunk: int) -> list[Case]:
    """Prompts of `tokens` alone, the shortest first, and one step of two that read beside some that decode."""
    ids = token_ids(config, max([*tokens, 2 * DECODING]))
    cases = []
    for count in sorted(tokens):
        bounds = [*range(0, count, chunk), count]
        steps = tuple((Chunk(ids, a, 0, b, following=min(count - b, chunk)),) for a, b in pairwise(bounds))
        cases.append(Case(f"1 x {count}", count, steps))
    part = min(chunk // 2, max(tokens) // 2)
    mixed = [Chunk(ids, 0, 0, part), Chunk(ids, 0, 1, part)]
    mixed += [Chunk(ids, 2 * slot, slot, 2 * slot + 1) for slot in range(2, DECODING + 1)]
    return [*cases, Case(f"2 x {part} and {DECODING - 1} that decode", 2 * part, (tuple(mixed),))]


@contextmanager
def switched(model: V41ForCausalLM, replay: str) -> Iterator[None]:
    """The same weights with bounded replay set so."""
    before = model.config
    for config in (before.replace(swa_bounded_replay=replay), before):
        model.config, model.batch_facts = config, batch_facts(config)
        for number, layer in enumerate(model.layers):
            layer.attn.late = is_late(config, number)
        if config is not before:
            yield


def attempt(compiled: Any, model: V41ForCausalLM, case: Case, cache: Cache, timed: bool) -> Record:
    """Everything measured of one case, or the error."""
    started = time.perf_counter()
    try:
        with torch.no_grad():
            found = measure(compiled, model, case, cache, timed)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        found = {"error": f"{type(error).__name__}: {' | '.join(lines[:4])[:600]}"}
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def measure(compiled: Any, model: V41ForCausalLM, case: Case, cache: Cache, timed: bool) -> Record:
    batches = batches_of(model, case, cache)
    found: Record = {"kept": [len(each.kept_rows) for each in batches], "rows": [len(each.tokens) for each in batches]}
    started = time.perf_counter()
    run(compiled, batches, cache)
    for _ in range(WARM if timed else 1):
        logits = run(compiled, batches, cache)
    found["first_s"] = round(time.perf_counter() - started, 1)
    found["logits"] = logits[: len(batches[-1].host.logits)].cpu()
    return found | ({"us": median_us(lambda: run(compiled, batches, cache))} if timed else {})


def batches_of(model: V41ForCausalLM, case: Case, cache: Cache) -> list[Batch]:
    return [build_batch(model.config, cache, step, buckets=Buckets()) for step in case.steps]


@torch.no_grad()
def eager(
    model: V41ForCausalLM, case: Case, cache: Cache, known: dict[tuple[str, str], torch.Tensor | str], replay: str
) -> torch.Tensor | str:
    """Logits of the plain model's last step under this switch, once for all contenders; or why there are none."""
    if (replay, case.name) not in known:
        try:
            batches = batches_of(model, case, cache)
            known[replay, case.name] = run(model, batches, cache)[: len(batches[-1].host.logits)].cpu()
        except torch.OutOfMemoryError:
            known[replay, case.name] = "eager does not fit into memory"
            free()
    return known[replay, case.name]


def run(compiled: Any, batches: Sequence[Batch], cache: Cache) -> torch.Tensor:
    for batch in batches:
        logits = compiled(batch, cache)
    return logits


def kl(eager: torch.Tensor, compiled: torch.Tensor) -> float:
    """The largest of all rows."""
    p, q = eager.double().log_softmax(-1), compiled.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


def median_us(call: Callable[[], object]) -> float:
    """µs of a call, from the device's events, the host's work before the first kernel included."""
    found: list[float] = []
    while len(found) < FEWEST or (sum(found) < SECONDS * 1e6 and len(found) < MOST):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1000)
    return round(statistics.median(found), 1)


def ratios(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """case -> contender -> its time by that of "off"."""
    off = {record["case"]: record["us"] for record in records if record["contender"] == "off" and "us" in record}
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if "us" in record and record["case"] in off:
            found.setdefault(record["case"], {})[record["contender"]] = round(record["us"] / off[record["case"]], 3)
    return found


def slower(ratios: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The cases that take longer with late layers on kept rows, from graphs, than with all layers on all rows."""
    return [case for case, by in ratios.items() if by.get("graphs", 0.0) > 1]


def line(record: Record) -> str:
    told = (
        record.get("error") or f"{record.get('us', '-')} us  kept {sum(record['kept'])} of {sum(record['rows'])} rows"
    )
    return f"{record['contender']}  {record['case']}: {told}"


def overview(records: Sequence[Record]) -> Any:
    """A row a case: rows that late layers run on, ms of each contender, and what it is of "off"."""
    names = list(dict.fromkeys(record["contender"] for record in records))
    made, by = (
        table("case", "rows", "kept", *(f"{name} ms" for name in names), *(f"{n} / off" for n in names)),
        ratios(records),
    )
    for case in dict.fromkeys(record["case"] for record in records):
        of = {record["contender"]: record for record in records if record["case"] == case}
        last: Record = next(
            (of[name] for name in reversed(names) if "kept" in of.get(name, {})), {"kept": [], "rows": []}
        )
        times = [f"{of[n]['us'] / 1000:.1f}" if "us" in of.get(n, {}) else None for n in names]
        add(made, case, sum(last["rows"]), sum(last["kept"]), *times, *(by.get(case, {}).get(name) for name in names))
    return made
