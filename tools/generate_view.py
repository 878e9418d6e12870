"""show_all and values: what `v41 generate` found, as aligned tables for a person or as plain values for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from v41.report import PassRun
from v41.tools.compare import KL_LIMIT, MOVE_LIMIT, Agreement, Row, join
from v41.tools.expected import regions_expected, regions_found, regions_table, regions_values
from v41.tools.report_view import as_json, show
from v41.tools.tables import add, counted, say, table

if TYPE_CHECKING:
    from v41.model_def.checkpoint import LoadSummary
    from v41.tools.generate_command import Outcome

WIDTH = 32  # characters of text shown of a prompt and of what follows
SHOWN = 5  # rows that break the criterion


def show_all(console: Console, outcome: Outcome) -> None:
    heading(console, headline(outcome))
    if outcome.loaded:
        say(console, reading(outcome.loaded))
    show_text(console, outcome)
    if outcome.share.world > 1:
        said = "have the same bits on all" if outcome.alike else "DIFFER between"
        say(console, f"logits {said} {outcome.share.world} ranks")
    if outcome.agreements:
        heading(console, "agreement with eager, both fed eager's tokens; a row of logits per request and step")
        show_agreement(console, outcome)
    heading(console, "what the compiler did")
    show(console, outcome.reports)
    console.print()
    console.print(regions_table(regions_found(passes_of(outcome)), by_config(outcome)))


def by_config(outcome: Outcome) -> dict[str, int]:
    """The regions that the config asks for."""
    return regions_expected(outcome.config, shared=outcome.share.world > 1)


def heading(console: Console, text: str) -> None:
    say(console, f"\n{text}", "bold cyan")


def headline(outcome: Outcome) -> str:
    config = outcome.config
    size = f"{outcome.parameters / 1e6:.1f} M parameters in {config.num_hidden_layers} layers"
    return f"DeepSeek-V4.1-Flash, {outcome.source}: {size}, on {outcome.device}, torch {torch.__version__}"


def reading(loaded: LoadSummary) -> str:
    """What of the checkpoint was read, what was left, and what Engram hashes."""
    left = f"; not used: {', '.join(loaded.not_used[:3])}, {len(loaded.not_used)} in all" if loaded.not_used else ""
    return f"{loaded.loaded} tensors read{left}; Engram's token map: {loaded.token_map}"


def show_text(console: Console, outcome: Outcome) -> None:
    vocabulary = outcome.vocabulary
    made = table("prompt", vocabulary.unit, "ends with", "is continued with", left=4)
    made.columns[1].justify = "right"
    for number, (prompt, ids) in enumerate(zip(outcome.prompts, outcome.made.requests, strict=True)):
        end, rest = vocabulary.decode(prompt[-WIDTH:])[-WIDTH:], vocabulary.decode(ids[len(prompt) :])
        add(made, str(number), len(prompt), visible(end), visible(rest))
    console.print(made)
    if outcome.source.startswith("preset"):
        say(console, noise([agreement for agreement, _ in outcome.agreements.values()]))
    first, *later = outcome.made.steps
    rows, seconds = sum(step.rows for step in later), sum(step.seconds for step in later)
    console.print()
    times = table("step", "steps", "rows", "s", "rows/s")
    add(times, "first, with compilation", 1, first.rows, f"{first.seconds:.1f}", None)
    add(times, "the others", len(later), rows, f"{seconds:.1f}", f"{rows / seconds:.0f}" if later else None)
    console.print(times)


def noise(agreements: Sequence[Agreement]) -> str:
    """What the text of a random model is; that eager writes the same is said where all bits were seen to be its."""
    same = bool(agreements) and all(each.bit_equal == len(each.rows) for each in agreements)
    return "random weights: what follows is noise" + ", but the same noise eager writes" * same


def visible(text: str) -> str:
    """The text on one line: what cannot be printed shows as a dot."""
    return "".join(c if c.isprintable() and c != "\ufffd" else "·" for c in text)


def show_agreement(console: Console, outcome: Outcome) -> None:
    counts = ("rows", "bit-equal", "same argmax", "excused", "failed")
    made = table("seed", *counts, "max KL", "moved", "median top-2 gap")
    for seed, (agreement, _) in outcome.agreements.items():
        add(made, str(seed), *columns(agreement))
    whole = join(agreement for agreement, _ in outcome.agreements.values())
    add(made, "all", *columns(whole))
    console.print(made)
    say(console, verdict(whole), "bold green" if whole.holds else "bold red")
    for seed, row, request, position in failures(outcome)[:SHOWN]:
        line = f"         seed {seed}, request {request}, position {position}: KL {row.kl:.3g}, gap {row.gap:.3g}, "
        say(console, f"{line}last bits move it {row.deviation:.3g}")


def columns(found: Agreement) -> tuple[int | float | None, ...]:
    counts = (found.bit_equal, found.same_argmax, found.excused or None, found.failed or None)
    return (len(found.rows), *counts, found.max_kl or None, found.moved or None, found.median_gap)


def verdict(found: Agreement) -> str:
    rule = f"KL <= {KL_LIMIT} and eager's argmax, or one within twice what last bits move"
    if found.holds:
        return f"holds    {rule}: {counted(len(found.rows), 'row')}, {found.excused} of them by that excuse"
    if found.failed:
        return f"fails    {rule}: {found.failed} of {counted(len(found.rows), 'row')} break it"
    return f"fails    rows moved {found.moved:.3g} times as far as by last bits, in the median (limit {MOVE_LIMIT})"


def failures(outcome: Outcome) -> list[tuple[int, Row, int, int]]:
    """Seed, row, request and position of each row that breaks the criterion."""
    return [
        (seed, row, *place)
        for seed, (agreement, places) in outcome.agreements.items()
        for row, place in zip(agreement.rows, places, strict=True)
        if not row.holds
    ]


def passes_of(outcome: Outcome) -> list[PassRun]:
    """What the passes did, in all graphs."""
    return [run for report in outcome.reports for run in report.passes]


def values(outcome: Outcome) -> dict[str, Any]:
    """The same facts for --json."""
    return {
        "model": outcome.source,
        "layers": outcome.config.num_hidden_layers,
        "parameters": outcome.parameters,
        "checkpoint": asdict(outcome.loaded) if outcome.loaded else None,
        "device": outcome.device,
        "torch": torch.__version__,
        "requests": [
            {"prompt": prompt, "continued_with": ids[len(prompt) :]}
            for prompt, ids in zip(outcome.prompts, outcome.made.requests, strict=True)
        ],
        "steps": [{"rows": step.rows, "seconds": step.seconds} for step in outcome.made.steps],
        "ranks": {"count": outcome.share.world, "alike": outcome.alike},
        "holds": outcome.holds,
        "agreement": {seed: agreement_values(agreement) for seed, (agreement, _) in outcome.agreements.items()},
        "regions": regions_values(passes_of(outcome), by_config(outcome)),
        "graphs": as_json(outcome.reports),
    }


def agreement_values(found: Agreement) -> dict[str, Any]:
    names = ("bit_equal", "same_argmax", "excused", "failed", "max_kl", "max_deviation", "moved", "median_gap", "holds")
    broken = [asdict(row) for row in found.rows if not row.holds][:SHOWN]
    return {"rows": len(found.rows), **{name: getattr(found, name) for name in names}, "broken": broken}
