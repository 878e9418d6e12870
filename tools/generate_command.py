"""`v41 generate`: the compiled model reads and writes; then how it agrees with eager and what the compiler did.

model        the plain model: a preset with random weights, or a checkpoint
text         each prompt's end and what follows it: the likeliest tokens, or drawn ones
agreement    with --compare-eager: a row of logits per request and step, over seeds (see compare.py)
graphs       passes, pieces, fallbacks, options: the compiler's own report (see report_view.py)
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from v41.codegen import effective_codegen
from v41.errors import NoSuchDevice
from v41.model_def.checkpoint import LoadSummary
from v41.model_def.checkpoint import Progress as Hear
from v41.model_def.config import V41Config
from v41.model_def.counts import count
from v41.model_def.generation import Forward, greedy, sampling
from v41.model_def.model import V41ForCausalLM
from v41.model_def.parallel import WHOLE, Share
from v41.options import Options
from v41.report import CompileReport, collect
from v41.runtime.past_guards import past_guards
from v41.tools.bytes import packaged_prompts
from v41.tools.compare import Agreement, agree
from v41.tools.engram_tables import place_tables
from v41.tools.generate_view import show_all, values
from v41.tools.json_output import print_json
from v41.tools.last_bits import NUDGED, reference
from v41.tools.pass_runs import console_of
from v41.tools.progress import Bars, progress
from v41.tools.ranks import alike, joined, own_device, random_model
from v41.tools.recording import Recording, record, replay, steps_needed
from v41.tools.vocabulary import Vocabulary, vocabulary_of

RUNS = 3 + NUDGED  # of a comparison: eager, the exact one, those with other last bits, the compiled one


@dataclass(frozen=True)
class Outcome:
    """All that the command found, before any of it is printed."""

    source: str
    config: V41Config
    device: str
    parameters: int
    loaded: LoadSummary | None  # where a checkpoint was read
    vocabulary: Vocabulary
    prompts: list[list[int]]
    made: Recording
    agreements: dict[int, tuple[Agreement, list[tuple[int, int]]]]  # seed -> rows, and request and position of each
    reports: list[CompileReport]
    share: Share  # of the model, that this process ran
    alike: bool = True  # whether all ranks have the same bits of logits

    @property
    def holds(self) -> bool:
        return self.alike and all(agreement.holds for agreement, _ in self.agreements.values())


def generate_command(arguments: Namespace) -> int:
    console = console_of(arguments)
    device = checked_device(own_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")))
    with joined(device) as share, progress(quiet=share.rank > 0) as bars:
        outcome = carry_out(arguments, bars, device, share)
    if share.rank > 0:
        return 0 if outcome.holds else 1
    if arguments.json:
        print_json("generate", values(outcome))
    else:
        show_all(console, outcome)
    return 0 if outcome.holds else 1


def carry_out(arguments: Namespace, bars: Bars, device: str, share: Share = WHOLE) -> Outcome:
    """Everything but the printing."""
    effective_codegen(Options(codegen=arguments.codegen), torch.device(device))  # refuses what would fail later
    source = arguments.checkpoint if arguments.checkpoint is not None else f"preset {preset(arguments)}"
    source += f", shared by {share.world} ranks" if share.world > 1 else ""
    model = build_model(arguments, 0, device, loading(bars), share)
    place_tables(model, arguments.tables, device)
    config = model.config
    vocabulary = vocabulary_of(config, arguments.checkpoint)
    prompts = [vocabulary.encode(text) for text in arguments.prompt or packaged_prompts()]
    options = {"codegen": arguments.codegen, "all_reduce": arguments.all_reduce}
    compiled = past_guards(torch.compile(model, backend="v41", options=options))
    choose = sampling(arguments.temperature, generator_of(device, 0)) if arguments.temperature else greedy
    settings: dict[str, Any] = {"tokens": arguments.tokens, "chunk": arguments.chunk, "device": device}
    steps = steps_needed(prompts, arguments.tokens, arguments.chunk)

    agreements = {}
    with collect() as reports:
        tick = bars.begin("compile, read and write", steps)
        made = record(compiled, config, prompts, **settings, choose=choose, progress=tick)
        for seed in range(arguments.seeds if arguments.compare_eager else 0):
            if seed and not arguments.checkpoint:
                model.load_state_dict(build_model(arguments, seed, device, share=share).state_dict())
            tick = bars.begin(f"compare with eager, seed {seed}", steps * RUNS)
            agreements[seed] = compare(model, compiled, prompts, seed, settings, tick)
    with torch.device("meta"):
        counts = count(model if share.world == 1 else V41ForCausalLM(config))
    size = counts.backbone + counts.engram_tables
    found = (made, agreements, reports, share, alike(share, made.logits))
    return Outcome(source, config, device, size, model.loaded, vocabulary, prompts, *found)


def checked_device(device: str) -> str:
    """`device`, if tensors can be made there that hold values. NoSuchDevice if not."""
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        raise NoSuchDevice("--device", device=device, problem=str(error).splitlines()[0]) from None
    return device


def loading(bars: Bars) -> Hear:
    """Shows how much of a checkpoint has been read, in MB."""
    shown = bars.amount("read the checkpoint, MB")
    return lambda done, whole: shown(done // 10**6, whole // 10**6)


def generator_of(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def build_model(
    arguments: Namespace,
    seed: int,
    device: str,
    heard: Hear = lambda done, whole: None,
    share: Share = WHOLE,
) -> V41ForCausalLM:
    """`share` of the plain model, its weights from the checkpoint, or random ones that only `seed` decides."""
    if arguments.checkpoint is not None:
        return V41ForCausalLM.from_checkpoint(arguments.checkpoint, device, progress=heard, share=share)
    return random_model(V41Config.preset(preset(arguments)), seed, device, share)


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
    """Eager writes, with tokens drawn by `seed`; the others read the same."""
    eager, last_bits = reference(model, prompts, seed, settings, tick)
    logits = replay(compiled, model.config, eager, settings["device"], tick)
    return agree(eager.logits, logits, last_bits), eager.places
