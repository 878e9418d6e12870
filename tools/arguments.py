"""arguments: those that several commands share, and how their values are read. Nothing heavy is imported here.

    add_source(command)      MODEL, by position or as -m, and how it is captured where it is no saved run
    add_step(command, [16])  --tokens, --context, --size: which steps are reckoned
    add_reading(command)     which model, on which device, reads and writes what
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from v41.options import ALL_REDUCES, CODEGENS

PRESETS = "tiny, bench (90 GB) or flash (503 GB), with random weights"
MODELS = "a preset (tiny, bench, flash), a checkpoint folder, or MODULE:FUNCTION that returns (model, inputs)"
MOST = 2**63
TROUBLE = "a site was refused that the model could spell otherwise, a pass failed, or the config asks for other regions"
RUN_OR_MODEL = f"a folder that v41 capture wrote, {MODELS} (tiny)"


def add_source(command: argparse.ArgumentParser, *, position: bool = True, told: str = RUN_OR_MODEL) -> None:
    """The one argument by which every command is told what to look at; by position too, where no names stand there."""
    if position:
        command.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=told)
    named = argparse.SUPPRESS if position else told
    options = ("-m", "--model", "--preset", "--run")  # one argument: its value tells which of these it is
    command.add_argument(*options, dest="model", default="tiny", metavar="MODEL", help=named)
    add_layers(command)


def add_layers(command: argparse.ArgumentParser) -> None:
    """What is captured, where a model is; none is given where a saved run is read (sources.refuse_unused)."""
    add_codegen(command)
    command.add_argument("--layers", type=positive, metavar="N", help="the first N layers of a preset or checkpoint")
    told = "as one of N processes that share a preset or checkpoint runs it (1)"
    command.add_argument("--ranks", type=positive, metavar="N", help=told)
    told = "of ranks: add up in a kernel with what reads the sum (this), or as the library does it"
    command.add_argument("--all-reduce", choices=ALL_REDUCES[1:], help=told)


def add_codegen(command: argparse.ArgumentParser) -> None:
    told = "as for that codegen: triton (this: as on a GPU, which need not be here), inductor, or eager, as on a CPU"
    command.add_argument("--codegen", choices=("triton", "inductor", "eager"), help=told)


def add_common(command: argparse.ArgumentParser, strict: str = TROUBLE) -> None:
    """What every command has that tells of a model. strict: when --strict makes it exit with 1."""
    add_json(command)
    command.add_argument("--strict", action="store_true", help=f"exit with 1 where {strict}")


def add_json(command: argparse._ActionsContainer) -> None:
    command.add_argument("--json", action="store_true", help="print the facts as JSON, in a layout with a version")


def add_passes(command: argparse.ArgumentParser, strict: str = TROUBLE, *, position: bool = True) -> None:
    add_source(command, position=position)
    add_common(command, strict)


def add_step(command: argparse.ArgumentParser, tokens: list[int]) -> None:
    """Which steps are reckoned."""
    told = f"rows of each step: up to 256 decode, more are one prefill ({','.join(map(str, tokens))})"
    command.add_argument("--tokens", type=counts, default=tokens, metavar="N,N", help=told)
    told = "tokens that decode reads (4096, or as many as the model can)"
    command.add_argument("--context", type=positive, metavar="N", help=told)
    command.add_argument("--size", type=named_size, action="append", default=[], metavar="NAME=N",
                         help="another size of the program; may be repeated")  # fmt: skip


def add_reading(command: argparse.ArgumentParser) -> None:
    """Which model, on which device, reads and writes what."""
    source = command.add_mutually_exclusive_group()
    source.add_argument("--preset", metavar="NAME", help=f"{PRESETS} (tiny)")
    source.add_argument("--checkpoint", metavar="DIR", help="a folder with config.json and its tensors")
    command.add_argument("--prompt", action="append", metavar="TEXT", help="read this; may be repeated (five prompts)")
    command.add_argument("--tokens", type=positive, default=16, metavar="N", help="tokens to write after each (16)")
    command.add_argument("--chunk", type=positive, default=64, metavar="N", help="rows of one prompt in a step (64)")
    command.add_argument("--device", default=None, help="cpu, cuda, ... (a GPU where there is one)")
    command.add_argument("--seeds", type=positive, default=5, metavar="N", help="models, or draws of one, to judge (5)")


def add_codegens(command: argparse.ArgumentParser) -> None:
    default = ["eager", "inductor", "triton"]
    said = f"how pieces run: some of {spaced(CODEGENS)} ({spaced(default)})"
    command.add_argument("--codegen", choices=CODEGENS, nargs="+", default=default, metavar="NAME", help=said)


def spaced(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


def positive(text: str) -> int:
    """A whole number that a tensor may have as a size."""
    value = int(text) if re.fullmatch("[0-9]{1,19}", text) else 0
    if not 1 <= value < MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a whole number from 1 to 2**63 - 1")
    return value


def counts(text: str) -> list[int]:
    """Each once: what is asked for twice is told once."""
    return [*dict.fromkeys(positive(part) for part in text.split(","))]


def named_size(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not NAME=NUMBER")
    return name, positive(number)


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]} is no number from 0 on")
    return value
