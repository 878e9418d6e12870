"""The `v41` command. A subcommand prints aligned tables or, with --json, the same facts; its exit code is the verdict.

0     done, and what was asked to hold holds
1     done, and it does not hold
2     refused: what was found, where, and what to do, on stderr
130   stopped by Ctrl-C: no file is half-written
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from v41 import __version__
from v41.gpu_facts import KNOWN
from v41.options import ALL_REDUCES, CODEGENS
from v41.tools.arguments import (
    MODELS,
    TROUBLE,
    add_common,
    add_json,
    add_layers,
    add_passes,
    add_reading,
    add_source,
    add_step,
    counts,
    positive,
    temperature,
)
from v41.tools.bench_arguments import add_bench
from v41.tools.completion import SHELLS
from v41.tools.parser import Parser

TABLES = ("mapped", "resident", "pinned")
COMMANDS = {  # what runs each: a module of v41.tools and its function
    "capture": ("capture_command", "capture_command"),
    "generate": ("generate_command", "generate_command"),
    "inspect": ("inspect_command", "inspect_command"),
    "cost": ("cost_command", "cost_command"),
    "partition": ("partition_command", "partition_command"),
    "memory": ("memory_command", "memory_command"),
    "explain": ("explain_command", "explain_command"),
    "kernels": ("kernels_command", "kernels_command"),
    "verify": ("verify_command", "verify_command"),
    "bisect": ("bisect_command", "bisect_command"),
    "completion": ("completion", "completion_command"),
    "timeline": ("timeline_command", "timeline_command"),
    "passes": ("passes_command", "passes_command"),
    "why-not": ("why_not", "why_not_command"),
    "diff": ("diff_command", "diff_command"),
    "bench": ("bench_command", "bench_command"),
}


def parser() -> Parser:
    made = Parser(prog="v41", description="DeepSeek-V4.1-Flash, compiled from its plain definition.")
    made.add_argument("--version", action="version", version=f"v41 {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands.add_parser("generate", help="read prompts, write tokens, show what the compiler did"))
    add_capture(commands.add_parser("capture", help="keep what the compiler makes of a model, for the commands below"))
    add_inspect(commands.add_parser("inspect", help="what the compiler finds in every layer, without weights"))
    add_cost(commands.add_parser("cost", help="bytes, operations, launches of a step, and the least time they take"))
    add_partition(commands.add_parser("partition", help="the pieces, why each begins there, and what crosses it"))
    add_memory(commands.add_parser("memory", help="what lives between pieces, at most, and the pool of captured steps"))
    add_timeline(commands.add_parser("timeline", help="when each piece of a decode step runs, by stream, predicted"))
    add_explain(commands.add_parser("explain", help="a node's way from its line of the model to what runs it"))
    add_pass_table(commands.add_parser("passes", help="per pass: sites, nodes, regions, launches and time"))
    add_why_not(commands.add_parser("why-not", help="which rule made a pass refuse a site, and what to do"))
    add_diff(commands.add_parser("diff", help="what a pass changed in the graph"))
    add_kernels(commands.add_parser("kernels", help="generated kernels: text, launches, registers, spills"))
    add_verify(commands.add_parser("verify", help="each pass numerically: the first node whose value is another"))
    add_bisect(commands.add_parser("bisect", help="the first pass with which a check of yours fails"))
    add_completion(commands.add_parser("completion", help="completion of commands and options for your shell"))
    add_bench(commands.add_parser("bench", help="measure on this GPU, check against fp64, keep the figures as JSON"))
    return made


def add_capture(command: argparse.ArgumentParser) -> None:
    command.description = "Captures a model on tensors without storage and keeps all that was found in a folder."
    command.add_argument("model", metavar="MODEL", help=MODELS)
    command.add_argument(
        "-o", "--out", required=True, metavar="RUN", help="the folder; a run that is there is replaced"
    )
    add_layers(command)
    add_common(command)


def add_inspect(command: argparse.ArgumentParser) -> None:
    command.description = "Captures a model on tensors without storage, runs the passes, and shows what each layer is."
    add_source(command)
    command.add_argument(
        "--against", type=Path, metavar="RUN", help="what differs from a saved run; exit 1 if any does"
    )
    command.add_argument("--changes", action="store_true", help="with --json: what each pass changed, for v41 diff")
    command.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs no network")
    command.add_argument("--dot", type=Path, metavar="FILE", help="write the graph for Graphviz")
    command.add_argument("--model-explorer", type=Path, metavar="FILE", help="write the graph for Model Explorer")
    command.add_argument("--of", metavar="NAME", help="with --dot or --model-explorer: one region's body, or one piece")
    add_common(command)


def add_cost(command: argparse.ArgumentParser) -> None:
    command.description = "What a step moves, computes and launches, by kind of region: estimates from shapes alone."
    add_source(command)
    add_step(command, [1, 128, 4096])
    command.add_argument("--gpu", default="H200", metavar="NAME", help="H200 (this), H200-copy, H100 or B200")
    add_common(command, f"{TROUBLE}, or operations are left out that nobody counts")


def add_partition(command: argparse.ArgumentParser) -> None:
    command.description = "The pieces of a program, why each begins where it does, and what it reads of those before."
    add_passes(command, f"{TROUBLE}, or no graph can hold a piece")


def add_memory(command: argparse.ArgumentParser) -> None:
    command.description = "What a step holds between its pieces, where it is fullest, and what graphs of a bucket need."
    add_source(command)
    add_step(command, [16, 4096])
    command.add_argument("--all", action="store_true", help="every value that lives at the peak, every rung of rows")
    add_common(command)


def add_explain(command: argparse.ArgumentParser) -> None:
    command.description = "Where a node comes from, what passes made of it, where it lies now, and what runs it."
    told = "a node, a region's body, a piece, an input, or a line of the model (mhc.py:66)"
    command.add_argument("name", metavar="NODE", help=told)
    add_source(command, position=False)
    add_common(command)


def add_kernels(command: argparse.ArgumentParser) -> None:
    command.description = "The kernels generated for a program, compiled for a GPU that need not be there."
    add_source(command)
    command.add_argument("--show", metavar="NAME", help="print the text of one, by the beginning of its name")
    command.add_argument("--arch", choices=tuple(KNOWN), help="compile for it: registers, spills")
    command.add_argument("--rows", type=counts, default=[1, 64], metavar="N,N", help="launches of 1, 64 or 4096 (1,64)")
    command.add_argument("--time", action="store_true", help="on the GPU at hand: µs of each alone, on drawn numbers")
    add_common(command, "no kernel is generated for a region of a kind that has them, or one spills")


def add_bisect(command: argparse.ArgumentParser) -> None:
    command.description = "Runs a check with the first so many passes alone, until it is known which one breaks it."
    add_json(command)
    command.add_argument("check", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="exits with 0 if all is well")


def add_completion(command: argparse.ArgumentParser) -> None:
    command.description = "Prints what your shell has to read."
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    add_json(command)


def add_verify(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Runs a model before and after each pass, on random inputs, and compares bits. Exits with 1 where a pass "
        "changed a value or broke a rule of programs."
    )
    add_source(command, told=f"{MODELS} (tiny); no saved run, for none holds what can be run")
    add_common(command, "values of a pass could not be compared, too")


def add_pass_table(command: argparse.ArgumentParser) -> None:
    command.description = "What each pass judged, applied and refused, and what it left of nodes and launches."
    add_passes(command)


def add_why_not(command: argparse.ArgumentParser) -> None:
    command.description = "Which rule made a pass refuse a site, the node and the line that break it, and what to do."
    command.add_argument("name", metavar="PASS", help="one of those that v41 passes lists")
    command.add_argument("site", metavar="SITE", nargs="?", help="its node, or BODY/NODE (all that were refused)")
    command.add_argument("--all", action="store_true", help="tell each site, not one of many that are alike")
    add_passes(command, "this pass failed or refused a site that the model could spell otherwise", position=False)


def add_diff(command: argparse.ArgumentParser) -> None:
    command.description = "The nodes that a pass made, took away, moved into a region, or let read something else."
    command.add_argument("name", metavar="PASS", help="one of those that v41 passes lists")
    command.add_argument("--all", action="store_true", help="show each change, not one of many that are alike")
    add_passes(command, "this pass failed or refused a site that the model could spell otherwise", position=False)


def add_timeline(command: argparse.ArgumentParser) -> None:
    command.description = "When each piece of a decode step runs, by stream: predicted; with --measure, run as well."
    add_source(command)
    command.add_argument("--rows", type=positive, metavar="N", help="of the step, up to 256 (16)")
    told = "run it too, a preset with random weights, on a GPU if there is one"
    command.add_argument("--measure", action="store_true", help=told)
    command.add_argument("--context", type=positive, metavar="N", help="tokens of each request then (512)")
    command.add_argument("--trace", type=Path, metavar="FILE", help="write one that Perfetto and Chrome show")
    add_common(command)


def add_generate(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Reads several prompts as one ragged batch and continues them with the compiled model. "
        "Exits with 1 where --compare-eager finds a row that fails."
    )
    add_reading(command)
    command.add_argument("--temperature", type=temperature, default=0.0, metavar="T",
                         help="draw tokens from softmax(logits / T); 0 takes the likeliest (0)")  # fmt: skip
    command.add_argument("--codegen", choices=CODEGENS, default="auto", help="how pieces run (auto)")
    command.add_argument("--all-reduce", choices=ALL_REDUCES, default="auto", help="who adds up over ranks (auto)")
    where = "Engram's, looked up by hashes of tokens: in their file, the host's memory, or there for the GPU (mapped)"
    command.add_argument("--tables", choices=TABLES, default="mapped", help=where)
    command.add_argument("--compare-eager", action="store_true", help="feed eager's tokens to both and compare")
    command.add_argument("--json", action="store_true", help="print the facts as JSON")


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Nothing heavy is imported before the arguments are known to be good."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before we came
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, for as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # no name of anybody's, and no bar, is beyond what can be printed
            stream.reconfigure(errors="backslashreplace")
    try:
        code = carried_out(parser().parse_args(argv))
        sys.stdout.flush()  # here, where it is known what to do if nobody reads it
        return code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        discard()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        discard()
        print(f"what is printed cannot be written: {error.strerror}\n  at   stdout\n  fix  make room", file=sys.stderr)
        return 2


def discard() -> None:
    """What is left to flush goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def carried_out(arguments: argparse.Namespace) -> int:
    """The exit code of the command; what v41 refuses is told on stderr."""
    from v41.errors import V41Error
    from v41.model_def.errors import ModelError

    try:
        module, name = COMMANDS[arguments.command]
        return int(getattr(import_module(f"v41.tools.{module}"), name)(arguments))
    except (V41Error, ModelError) as error:
        from v41.tools.tables import WIDTH, fitted

        print("\n".join(part for line in str(error).splitlines() for part in fitted(line, WIDTH)), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
