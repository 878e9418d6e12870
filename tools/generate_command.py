"""`v41 generate`: the compiled model reads and writes; then how it agrees with eager and what the compiler did.

    model        the plain model: a preset with random weights, or a checkpoint
    text         each prompt's end and what follows it
    agreement    with --compare-eager: a row of logits per request and step, over seeds (see compare.py)
    graphs       passes, pieces, fallbacks, options: the compiler's own report (see report_view.py)
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from v41.backend import effective_codegen
from v41.errors import NoSuchDevice
from v41.model_def.config import V41Config
from v41.model_def.generation import Forward, sampling
from v41.model_def.model import V41ForCausalLM
from v41.options import Options
from v41.report import CompileReport, collect
from v41.runtime.past_guards import past_guards
from v41.tools.bytes import encode, packaged_prompts
from v41.tools.compare import Agreement, agree
from v41.tools.exact import Exact
from v41.tools.generate_view import show_all, values
from v41.tools.recording import Recording, record, replay, steps_needed

WIDTH = 120


@dataclass(frozen=True)
class Outcome:
    """All that the command found, before any of it is printed."""

    source: str
    config: V41Config
    device: str
    parameters: int
    prompts: list[list[int]]
    made: Recording
    agreements: dict[int, tuple[Agreement, list[tuple[int, int]]]]  # seed -> rows, and request and position of each
    reports: list[CompileReport]

    @property
    def holds(self) -> bool:
        return all(agreement.holds for agreement, _ in self.agreements.values())


def generate_command(arguments: Namespace) -> int:
    console = Console(stderr=arguments.json)
    console.width = max(console.width, WIDTH)  # a narrow terminal wraps lines; a table cut short would hide figures
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        outcome = carry_out(arguments, progress)
    if arguments.json:
        print(json.dumps(values(outcome), indent=1))
    else:
        show_all(console, outcome)
    return 0 if outcome.holds else 1


def carry_out(arguments: Namespace, progress: Progress) -> Outcome:
    """Everything but the printing."""
    device = checked_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    effective_codegen(Options(codegen=arguments.codegen), torch.device(device))  # refuses what would fail later
    source = arguments.checkpoint if arguments.checkpoint is not None else f"preset {preset(arguments)}"
    model = build_model(arguments, seed=0, device=device)
    config = model.config
    prompts = [encode(text) for text in arguments.prompt or packaged_prompts()]
    compiled = past_guards(torch.compile(model, backend="v41", options={"codegen": arguments.codegen}))
    settings: dict[str, Any] = {"tokens": arguments.tokens, "chunk": arguments.chunk, "device": device}
    steps = steps_needed(prompts, arguments.tokens, arguments.chunk)

    def advancing(what: str) -> Callable[[], None]:
        task = progress.add_task(what, total=steps)
        return lambda: progress.advance(task)

    agreements = {}
    with collect() as reports:
        made = record(compiled, config, prompts, **settings, progress=advancing("compile, read and write"))
        for seed in range(arguments.seeds if arguments.compare_eager else 0):
            if seed and not arguments.checkpoint:
                model.load_state_dict(build_model(arguments, seed, device).state_dict())
            tick = advancing(f"compare with eager, seed {seed}")
            agreements[seed] = compare(model, compiled, prompts, seed, settings, tick)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Outcome(source, config, device, parameters, prompts, made, agreements, reports)


def checked_device(device: str) -> str:
    """`device`, if tensors can be made there that hold values. NoSuchDevice if not."""
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        raise NoSuchDevice("--device", device=device, problem=str(error).splitlines()[0]) from None
    return device


def build_model(arguments: Namespace, seed: int, device: str) -> V41ForCausalLM:
    """The plain model, its weights from the checkpoint, or random ones that only `seed` decides."""
    if arguments.checkpoint is not None:
        return V41ForCausalLM.from_checkpoint(arguments.checkpoint, device)
    return V41ForCausalLM.random(V41Config.preset(preset(arguments)), seed, device)


def preset(arguments: Namespace) -> str:
    return "tiny" if arguments.preset is None else str(arguments.preset)


def compare(
    model: V41ForCausalLM,
    compiled: Forward,
    prompts: list[list[int]],
    seed: int,
    settings: dict[str, Any],
    tick: Callable[[], None],
) -> tuple[Agreement, list[tuple[int, int]]]:
    """Eager writes, with tokens drawn by `seed`; the compiled model and the exact run read the same."""
    eager, exact = reference(model, prompts, seed, settings, tick)
    logits = replay(compiled, model.config, eager, settings["device"])
    return agree(eager.logits, logits, exact), eager.places


def reference(
    model: V41ForCausalLM,
    prompts: list[list[int]],
    seed: int,
    settings: dict[str, Any],
    tick: Callable[[], None] = lambda: None,
) -> tuple[Recording, Tensor]:
    """What eager writes with tokens drawn by `seed`, and the exact run's logits over the same."""
    choose = sampling(1.0, torch.Generator(settings["device"]).manual_seed(seed))
    eager = record(model, model.config, prompts, **settings, choose=choose, progress=tick)
    with Exact():
        return eager, replay(model, model.config, eager, settings["device"])
