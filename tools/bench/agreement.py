"""bench agreement: the compiled model against eager on this device, for every codegen, by the criterion of compare.py.

    per seed    eager writes (record) -> runs with other last bits and each compiled model read the same -> rows, judged
    fp64        the exact run judged by the other such runs, as if it were compiled

So a codegen that breaks rows where fp64 breaks none has lost more than last bits. Nothing is captured: graphs replay
the same kernels.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from v41.codegen import effective_codegen
from v41.options import Options
from v41.report import collect
from v41.tools.bench import timing
from v41.tools.bytes import encode, packaged_prompts
from v41.tools.compare import Agreement, agree, join
from v41.tools.generate_command import build_model, checked_device, preset
from v41.tools.generate_view import agreement_values
from v41.tools.last_bits import reference
from v41.tools.recording import replay

EXACT = "fp64"


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench agreement` does; 1 where a row of a codegen breaks the criterion."""
    device = checked_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for name in arguments.codegen:
        effective_codegen(Options(codegen=name), torch.device(device))  # refuses what would fail after the others
    started = time.perf_counter()
    source = Path(arguments.checkpoint).name if arguments.checkpoint else f"preset {preset(arguments)}"
    result: dict[str, Any] = {"case": "agreement", "model": source, **timing.provenance()}
    for found, facts in compare_all(arguments, device):
        result["codegens"] = {name: {**summary(rows), **facts.get(name, {})} for name, rows in found.items()}
        result["seconds"] = round(time.perf_counter() - started, 1)
        path = timing.save(result, arguments.out)
    print(table(result["codegens"]), f"\nwritten to {path}")
    return 0 if all(join(rows).holds for name, rows in found.items() if name != EXACT) else 1


def compare_all(
    arguments: Namespace, device: str
) -> Iterator[tuple[dict[str, list[Agreement]], dict[str, dict[str, Any]]]]:
    """After every seed, by codegen: an Agreement a seed so far; and what the compiler said of itself."""
    model = build_model(arguments, 0, device)
    prompts = [encode(text) for text in arguments.prompt or packaged_prompts()]
    settings = {"tokens": arguments.tokens, "chunk": arguments.chunk, "device": device}
    options = {name: {"codegen": name, "capture": "off"} for name in arguments.codegen}
    compiled = {name: torch.compile(model, backend="v41", options=each) for name, each in options.items()}
    found: dict[str, list[Agreement]] = {name: [] for name in (EXACT, *compiled)}
    facts: dict[str, dict[str, Any]] = {}
    for seed in range(arguments.seeds):
        if seed and not arguments.checkpoint:
            model.load_state_dict(build_model(arguments, seed, device).state_dict())
        made, last_bits = reference(model, prompts, seed, settings)
        found[EXACT].append(agree(made.logits, last_bits[0], last_bits[1:]))
        for name, forward in compiled.items():
            with collect() as reports:
                logits = replay(forward, model.config, made, device)
            rows = agree(made.logits, logits, last_bits)
            found[name].append(rows)
            for report in reports:
                facts[name] = {"kernels": len(report.kernels), "fallbacks": report.fallbacks}
            print(f"seed {seed}, {name}: {rows.failed} of {len(rows.rows)} rows break", flush=True)
        yield found, facts


def summary(seeds: list[Agreement]) -> dict[str, Any]:
    """All rows together, then each seed."""
    return {**agreement_values(join(seeds)), "by_seed": [agreement_values(each) for each in seeds]}


def table(codegens: dict[str, dict[str, Any]]) -> str:
    columns = ("rows", "bit_equal", "same_argmax", "excused", "failed", "max_kl", "max_deviation", "moved")
    lines = ["codegen " + "".join(f"{name:>14}" for name in columns)]
    for name, values in codegens.items():
        cells = (values[column] for column in columns)
        lines.append(f"{name:<8}" + "".join(f"{c:>14.4g}" if isinstance(c, float) else f"{c:>14}" for c in cells))
    return "\n".join(lines)
