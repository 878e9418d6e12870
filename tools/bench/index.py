"""bench index: generated indexers and selections at released sizes, against eager and torch.compile, on this GPU.

v41 bench index                    us of every contender by role, context and rows; table and JSON
v41 bench index check              what index_check.py lists
v41 bench index tune --rows 16     us of many ways to spread scores and to cut rows into tiles
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from v41.lowering.templates.index_scores import Spread
from v41.lowering.templates.topk import TopK
from v41.tools.bench import modes, timing
from v41.tools.bench.boundary import COPY_BYTES_A_US
from v41.tools.bench.index_cases import (
    BLOCK,
    KEEP,
    MOST_PLAIN,
    ROLES,
    WIDTH,
    K,
    Step,
    candidate_source,
    launch,
    re_indexer,
    scores_alone,
    scores_drawn,
    sets_of,
    source,
)
from v41.tools.bench.index_check import check
from v41.tools.bench.rivals import Call, attempted, compiled

TRIED = ((64, 1, 4), (64, 2, 4), (64, 8, 4), (128, 1, 4), (128, 4, 4), (128, 8, 8))  # entries, tiles, warps


def contenders(role: str) -> dict[str, Callable[[], Callable[[Step], Any]]]:
    forms: dict[str, Call] = {"source": source, "candidate_source": candidate_source, "re_indexer": re_indexer}
    plain = forms[role]

    def of(call: Call) -> Callable[[Step], Any]:
        return lambda step: call(*([step.mask] if role == "re_indexer" else []), *step.plain)

    return {"generated": lambda: partial(launch, role), "scores": lambda: partial(scores_alone, role),
            "eager": lambda: of(plain), "compile": lambda: of(compiled(plain, {}))}  # fmt: skip


def cases(contexts: Sequence[int], rows_list: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    for role in ROLES:
        for context in contexts:
            if role == "candidate_source" and context != max(contexts):
                continue
            for rows in rows_list:
                yield role, context, rows


@torch.no_grad()
def bench(contexts: Sequence[int], rows_list: Sequence[int], names: Sequence[str], deadline: float) -> Iterator[Any]:
    """One record a contender and case, the selections first."""
    for columns in (16_384, 131_072):
        for rows in rows_list:
            draw = scores_drawn(rows, columns)
            record: dict[str, Any] = {"role": f"{K} of {columns}", "context": columns, "rows": rows}
            floor = round(4 * rows * columns / COPY_BYTES_A_US, 2)
            rivals: dict[str, Call] = {"generated": TopK.of(K).launch, "torch.topk": partial(torch.topk, k=K)}
            for name, call in rivals.items():
                yield measured(
                    record | {"contender": name, "floor_us": floor}, lambda c=call: c, lambda d=draw: d, deadline
                )
    for name in names:
        for role, context, rows in cases(contexts, rows_list):
            if name in ("eager", "compile") and (rows * context > MOST_PLAIN or role == "candidate_source"):
                continue
            record = {"role": role, "context": context, "rows": rows, "contender": name}
            entries = min(context, KEEP * BLOCK) if role == "re_indexer" else context
            record["floor_us"] = round(rows * entries * (WIDTH // 32 * 17) / COPY_BYTES_A_US, 2)
            yield measured(
                record, contenders(role)[name], partial(sets_of, rows, context, role == "re_indexer"), deadline
            )


def measured(record: dict[str, Any], make: Call, sets: Call, deadline: float) -> dict[str, Any]:
    """`record` with the time of what `make` makes on what `sets` makes, and its launches."""

    def measure() -> dict[str, Any]:
        call, given = make(), sets()
        us = round(timing.microseconds(call, given), 2)
        return {"us": us, "origin": timing.launches(lambda: call(*given[0]), ("scores_", "maxima", "select"))}

    try:
        return attempted(record, deadline, measure)
    finally:
        torch.cuda.empty_cache()


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line a case: the floor, then every contender."""
    names = list(dict.fromkeys(record["contender"] for record in records))
    lines = [f"{'role':<18}{'context':>9}{'rows':>6}{'floor':>9}" + "".join(f"{name:>13}" for name in names) + "  (µs)"]
    known = {(r["role"], r["context"], r["rows"]): r["floor_us"] for r in records}
    us = {(r["role"], r["context"], r["rows"], r["contender"]): r.get("us") for r in records}
    for (role, context, rows), floor in known.items():
        cells = "".join(f"{us.get((role, context, rows, name)) or '-':>13}" for name in names)
        lines.append(f"{role:<18}{context:>9}{rows:>6}{floor:>9}{cells}")
    return "\n".join(lines)


@torch.no_grad()
def tune(contexts: Sequence[int], rows_list: Sequence[int], deadline: float) -> Iterator[dict[str, Any]]:
    """Spreads of the scores alone, then tiles of the selection alone."""
    for role, context, rows in cases(contexts, rows_list):
        sets = sets_of(rows, context, role == "re_indexer") if role != "candidate_source" else []
        for block, turns, warps in TRIED if sets else ():
            spread = Spread(1, turns, block, warps)
            record: dict[str, Any] = {"role": role, "context": context, "rows": rows, "spread": str(spread)}
            alone = partial(scores_alone, role, spread=spread)
            yield measured(record, lambda alone=alone: alone, lambda sets=sets: sets, deadline)
    for columns in (16_384, 131_072):
        for rows in rows_list:
            drawn = scores_drawn(rows, columns)
            for tile in (2048, 4096, 8192, 16_384):
                record = {"role": f"{K} of {columns}", "context": columns, "rows": rows, "tile": tile}
                call = partial(TopK.of(K).launch, schedule=tile)
                yield measured(record, lambda call=call: call, lambda drawn=drawn: drawn, deadline)


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench index` does; 1 where a check fails."""
    timed = {
        "bench": lambda deadline: bench(arguments.contexts, arguments.rows, arguments.contenders, deadline),
        "tune": lambda deadline: tune(arguments.contexts, arguments.rows, deadline),
    }
    return modes.run(arguments, "index", check, timed, table)
