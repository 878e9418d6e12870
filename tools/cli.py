"""The `v41` command. A subcommand prints aligned tables or, with --json, the same facts; its exit code is the verdict.

0     done, and what was asked to hold holds
1     done, and it does not hold
2     refused: what was found, where, and what to do, on stderr
130   stopped by Ctrl-C: no file is half-written
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from v41 import __version__
from v41.options import ALL_REDUCES, CODEGENS
from v41.tools.completion import SHELLS
from v41.tools.parser import Parser

PRESETS = "tiny, bench (90 GB) or flash (503 GB), with random weights"
MODELS = "a preset (tiny, bench, flash), a checkpoint folder, or MODULE:FUNCTION that returns (model, inputs)"
RUN_OR_MODEL = f"a folder that v41 capture wrote, {MODELS} (tiny)"
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
}


def parser() -> Parser:
    made = Parser(prog="v41", description="DeepSeek-V4.1-Flash, compiled from its plain definition.")
    made.add_argument("--version", action="version", version=f"v41 {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands.add_parser("generate", help="read prompts, write tokens, show what the compiler did"))
    add_capture(commands.add_parser("capture", help="keep what the compiler makes of a model, for the commands below"))
    add_inspect(commands.add_parser("inspect", help="what the compiler finds in every layer, without weights"))
    add_cost(commands.add_parser("cost", help="bytes, operations, launches of a step, and the least time they take"))
    add_passes(commands.add_parser("partition", help="the pieces, why each begins where it does, and what crosses it"))
    add_memory(commands.add_parser("memory", help="what lives between pieces, at most, and the pool of captured steps"))
    add_timeline(commands.add_parser("timeline", help="when each piece of a decode step runs, by stream, predicted"))
    add_explain(commands.add_parser("explain", help="a node's way from its line of the model to what runs it"))
    add_passes(commands.add_parser("passes", help="per pass: sites, nodes, regions, launches and time"))
    add_why_not(commands.add_parser("why-not", help="which rule made a pass refuse a site, and what to do"))
    add_diff(commands.add_parser("diff", help="what a pass changed in the graph"))
    add_kernels(commands.add_parser("kernels", help="generated kernels: text, launches, registers, spills"))
    add_passes(commands.add_parser("verify", help="each pass numerically: the first node whose value is another"))
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


def add_source(command: argparse.ArgumentParser, *, position: bool = True) -> None:
    """The one argument by which every command is told what to look at; by position too, where no names stand there."""
    if position:
        command.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=RUN_OR_MODEL)
    named = argparse.SUPPRESS if position else RUN_OR_MODEL
    options = ("-m", "--model", "--preset", "--run")  # one argument: its value tells which of these it is
    command.add_argument(*options, dest="model", default="tiny", metavar="MODEL", help=named)
    add_layers(command)


def add_layers(command: argparse.ArgumentParser) -> None:
    """What is captured, where a model is."""
    add_codegen(command)
    command.add_argument("--layers", type=positive, metavar="N", help="the first N layers of a preset or checkpoint")
    told = "as one of N processes that share a preset or checkpoint runs it (1)"
    command.add_argument("--ranks", type=positive, default=1, metavar="N", help=told)


def add_codegen(command: argparse.ArgumentParser) -> None:
    told = "as for that codegen: triton (this: as on a GPU, which need not be here), inductor, or eager, as on a CPU"
    command.add_argument("--codegen", choices=("triton", "inductor", "eager"), default="triton", help=told)


def add_common(command: argparse.ArgumentParser) -> None:
    """What every command has that judges a model."""
    add_json(command)
    add_strict(command)


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the facts as JSON, in a layout with a version")


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
    add_common(command)


def add_memory(command: argparse.ArgumentParser) -> None:
    command.description = "What a step holds between its pieces, where it is fullest, and what graphs of a bucket need."
    add_source(command)
    add_step(command, [16, 4096])
    command.add_argument("--all", action="store_true", help="every value that lives at the peak, every rung of rows")
    add_json(command)


def add_explain(command: argparse.ArgumentParser) -> None:
    command.description = "Where a node comes from, what passes made of it, where it lies now, and what runs it."
    told = "a node, a region's body, a piece, an input, or a line of the model (mhc.py:66)"
    command.add_argument("name", metavar="NODE", help=told)
    add_source(command, position=False)
    add_json(command)


def add_kernels(command: argparse.ArgumentParser) -> None:
    command.description = "The kernels generated for a program, compiled for a GPU that need not be there."
    add_source(command)
    command.add_argument("--show", metavar="NAME", help="print the text of one, by the beginning of its name")
    command.add_argument("--arch", choices=("sm_80", "sm_90", "sm_100"), help="compile for it: registers, spills")
    command.add_argument("--rows", type=counts, default=[1, 64], metavar="N,N", help="launches of 1, 64 or 4096 (1,64)")
    add_common(command)


def add_bisect(command: argparse.ArgumentParser) -> None:
    command.description = "Runs a check with the first so many passes alone, until it is known which one breaks it."
    add_json(command)
    command.add_argument("check", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="exits with 0 if all is well")


def add_completion(command: argparse.ArgumentParser) -> None:
    command.description = "Prints what your shell has to read."
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def add_step(command: argparse.ArgumentParser, tokens: list[int]) -> None:
    """Which steps are reckoned."""
    told = f"rows of each step: up to 256 decode, more are one prefill ({','.join(map(str, tokens))})"
    command.add_argument("--tokens", type=counts, default=tokens, metavar="N,N", help=told)
    command.add_argument("--context", type=positive, default=4096, metavar="N", help="tokens that decode reads (4096)")
    command.add_argument("--size", type=named_size, action="append", default=[], metavar="NAME=N",
                         help="another size of the program; may be repeated")  # fmt: skip


def add_passes(command: argparse.ArgumentParser, *, position: bool = True) -> None:
    add_source(command, position=position)
    add_common(command)


def add_strict(command: argparse.ArgumentParser) -> None:
    told = "exit with 1 where a site was refused, a pass failed or (inspect, passes) the config asks for other regions"
    command.add_argument("--strict", action="store_true", help=told)


def add_why_not(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="PASS", help="one of those that v41 passes lists")
    command.add_argument("site", metavar="SITE", nargs="?", help="the name of its node (all that were refused)")
    add_passes(command, position=False)


def add_diff(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="PASS", help="one of those that v41 passes lists")
    command.add_argument("--all", action="store_true", help="show each change, not one of many that are alike")
    add_passes(command, position=False)


def add_timeline(command: argparse.ArgumentParser) -> None:
    command.description = "When each piece of a decode step runs, by stream: predicted; with --measure, run as well."
    add_source(command)
    command.add_argument("--rows", type=positive, default=16, metavar="N", help="of the step (16)")
    told = "run it too, a preset with random weights, on a GPU if there is one"
    command.add_argument("--measure", action="store_true", help=told)
    command.add_argument("--context", type=positive, default=512, metavar="N", help="tokens of each request then (512)")
    command.add_argument("--trace", type=Path, metavar="FILE", help="write one that Perfetto and Chrome show")
    add_json(command)


def add_bench(command: argparse.ArgumentParser) -> None:
    cases = command.add_subparsers(dest="case", required=True, metavar="CASE")
    boundary = cases.add_parser("boundary", help="the mHC boundary: the generated kernel and its contenders")
    modes = "bench: times (the default); check: values, bits and races; tune: times of many schedules"
    boundary.add_argument("mode", nargs="?", choices=("bench", "check", "tune"), default="bench", help=modes)
    rows = [1, 16, 64, 256, 1024, 4096]
    boundary.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    boundary.add_argument("--budget", type=float, default=420, help="seconds after which no contender starts (420)")
    boundary.add_argument("--workers", type=positive, default=12, help="processes that compile schedules (12)")
    add_rowwise(rowwise := cases.add_parser("rowwise", help="kernels of the row-wise work between products, likewise"))
    add_attention(attention := cases.add_parser("attention", help="sparse attention at released widths, likewise"))
    add_index(index := cases.add_parser("index", help="index scores and selections at released sizes, likewise"))
    add_allreduce(allreduce := cases.add_parser("allreduce", help="sums over ranks fused with what reads them"))
    add_experts(experts := cases.add_parser("experts", help="grouped products of routed experts, few rows a group"))
    agreement = cases.add_parser("agreement", help="whole models against eager, every codegen, beside an fp64 run")
    add_reading(agreement)
    add_codegens(agreement)
    capacity = cases.add_parser("capacity", help="time and bytes of a step at 1 and 64 fold cache capacity")
    add_codegens(capacity)
    program = cases.add_parser("program", help="whole steps: v41 against eager and the modes of torch.compile")
    add_program(program)
    add_overlap(overlap := cases.add_parser("overlap", help="decode steps with side streams against one stream"))
    add_prefill(prefill := cases.add_parser("prefill", help="prompts with late layers on all rows, and on those read"))
    add_tables(tables := cases.add_parser("tables", help="Engram look-ups in tables of the host: mapped, pinned"))
    add_compile(compiled := cases.add_parser("compile", help="what capturing a model costs, by phase and by layers"))
    made = (boundary, rowwise, attention, index, allreduce, experts, agreement, capacity, program, overlap, prefill)
    for case in (*made, tables, compiled):
        case.add_argument("--out", type=Path, metavar="FILE", help="for the JSON (a new one in tools/bench/results/)")


def add_rowwise(command: argparse.ArgumentParser) -> None:
    modes = "bench: times (the default); check: values, bits, races; tune: ways to spread rows; pairs: ten drawn"
    command.add_argument("mode", nargs="?", choices=("bench", "check", "tune", "pairs"), default="bench", help=modes)
    rows, names = [1, 16, 64, 256, 4096], ["generated", "eager", "compile", "max-autotune"]
    known = ["norm", "norm_quantise", "norm_rope_fp8", "norm_rope_fp4", "norm_rope_mxfp4", "swiglu_quantise",
             "stream_gate", "collapse_norm", "pooled", "router", "boundary", "three_streams", "layer_norm",
             "extra_output"]  # fmt: skip
    command.add_argument("--cases", choices=known, nargs="+", default=known, metavar="NAME", help=f"({spaced(known)})")
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    command.add_argument("--contenders", choices=[*names, "held", "passes"], nargs="+", default=names, metavar="NAME",
                         help=f"{spaced(names)} (these), held, passes: the two kinds of kernel")  # fmt: skip
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of what pairs draws (0)")
    command.add_argument("--workers", type=positive, default=12, help="processes that compile schedules (12)")
    command.add_argument("--budget", type=float, default=380, help="seconds after which nothing starts (380)")


def add_attention(command: argparse.ArgumentParser) -> None:
    modes = "bench: times (the default); check: values, bits, pads; tune: times of many ways to spread a row"
    command.add_argument("mode", nargs="?", choices=("bench", "check", "tune"), default="bench", help=modes)
    rows, names = [1, 16, 64, 1024, 4096], ["generated", "eager", "compile", "max-autotune"]
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    command.add_argument("--contenders", choices=names, nargs="+", default=names, metavar="NAME",
                         help=f"({spaced(names)})")  # fmt: skip
    command.add_argument("--budget", type=float, default=300, help="seconds after which no contender starts (300)")


def add_index(command: argparse.ArgumentParser) -> None:
    modes = "bench: times (the default); check: picks, values, bits, pads; tune: times of many ways to spread a row"
    command.add_argument("mode", nargs="?", choices=("bench", "check", "tune"), default="bench", help=modes)
    rows, contexts, names = [1, 16, 64], [8192, 65_536, 524_288], ["generated", "scores", "eager", "compile"]
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    command.add_argument("--contexts", type=positive, nargs="+", default=contexts, metavar="N",
                         help=f"entries that each row sees ({spaced(contexts)})")  # fmt: skip
    command.add_argument("--contenders", choices=names, nargs="+", default=names, metavar="NAME",
                         help=f"({spaced(names)}); scores: ours without the selections")  # fmt: skip
    command.add_argument("--budget", type=float, default=90, help="seconds after which no contender starts (90)")


def add_experts(command: argparse.ArgumentParser) -> None:
    modes = "bench: times and errors (the default); tune: times of several tiles"
    command.add_argument("mode", nargs="?", choices=("bench", "tune"), default="bench", help=modes)
    rows = [1, 16, 64, 256]
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"tokens ({spaced(rows)})")


def add_allreduce(command: argparse.ArgumentParser) -> None:
    modes = "bench: times (the default); check: values, bits, replays with ranks adrift, a rank that stays away"
    command.add_argument("mode", nargs="?", choices=("bench", "check"), default="bench", help=modes)
    rows, cases = [1, 2, 5, 16, 40, 64, 256, 1024, 4096], ["critical", "seam", "residual"]
    command.add_argument("--ranks", type=positive, nargs="+", default=[2], metavar="N",
                         help="of a group, one group after the other (2); under torchrun, its own")  # fmt: skip
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    command.add_argument("--cases", choices=cases, nargs="+", default=cases, metavar="NAME", help=f"({spaced(cases)})")
    command.add_argument("--replays", type=positive, metavar="N",
                         help="calls in graphs (10000; 500 where ranks share a GPU)")  # fmt: skip
    command.add_argument("--budget", type=float, default=400, help="seconds after which nothing starts (400)")


def add_codegens(command: argparse.ArgumentParser) -> None:
    default = ["eager", "inductor", "triton"]
    said = f"how pieces run: some of {spaced(CODEGENS)} ({spaced(default)})"
    command.add_argument("--codegen", choices=CODEGENS, nargs="+", default=default, metavar="NAME", help=said)


def add_program(command: argparse.ArgumentParser) -> None:
    rows, prefill = [1, 16, 64, 256], [1024, 8192]
    default = ["eager", "v41", "v41-uncaptured", "reduce-overhead", "compile"]
    command.add_argument("--preset", default="bench", metavar="NAME", help=f"{PRESETS} (bench)")
    command.add_argument("--cut", action="store_true", help="four layers of it, one of each kind")
    command.add_argument("--rows", type=positive, nargs="*", default=rows, metavar="N",
                         help=f"of steps that decode ({spaced(rows)}); none leaves them out")  # fmt: skip
    command.add_argument("--prefill", type=positive, nargs="*", default=prefill, metavar="N",
                         help=f"rows of steps that read ({spaced(prefill)}); none leaves them out")  # fmt: skip
    command.add_argument("--context", type=positive, default=4096, metavar="N",
                         help="tokens of each request that decodes (4096)")  # fmt: skip
    command.add_argument("--contenders", choices=[*default, "max-autotune"], nargs="+", default=default, metavar="NAME",
                         help=f"{spaced(default)} (these), max-autotune")  # fmt: skip
    command.add_argument("--codegen", choices=CODEGENS, default="auto", help="how v41's pieces run (auto)")
    command.add_argument("--budget", type=float, default=480, help="seconds after which nothing starts (480)")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: all but the times (cuda)")


def add_prefill(command: argparse.ArgumentParser) -> None:
    tokens, contenders = [1024, 2048, 4096, 8192, 16384, 32768, 65536], ["off", "graphs", "replay", "halo"]
    command.add_argument("--preset", default="bench", metavar="NAME", help=f"{PRESETS} (bench)")
    command.add_argument("--cut", action="store_true", help="four layers of it, one of each kind")
    command.add_argument("--tokens", type=positive, nargs="+", default=tokens, metavar="N",
                         help=f"of prompts ({spaced(tokens)})")  # fmt: skip
    command.add_argument("--chunk", type=positive, default=8192, metavar="N", help="rows of a step that reads (8192)")
    command.add_argument("--contenders", choices=contenders, nargs="+", default=contenders, metavar="NAME",
                         help=f"some of {spaced(contenders)} (all)")  # fmt: skip
    command.add_argument("--codegen", choices=CODEGENS, default="auto", help="how pieces run (auto)")
    command.add_argument("--budget", type=float, default=270, help="seconds after which nothing starts (270)")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: all but the times (cuda)")


def add_overlap(command: argparse.ArgumentParser) -> None:
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    command.add_argument("--preset", default="bench", metavar="NAME", help=f"{PRESETS} (bench)")
    command.add_argument("--cut", action="store_true", help="four layers of it, one of each kind")
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    command.add_argument("--context", type=positive, default=4096, metavar="N", help="tokens of each request (4096)")
    command.add_argument("--codegen", choices=CODEGENS, default="auto", help="how pieces run (auto)")
    command.add_argument("--stress", type=positive, metavar="N", help="then decode so many steps, streams delayed")
    command.add_argument("--budget", type=float, default=440, help="seconds; stress takes what is left of them (440)")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: bits alone, in order (cuda)")


def add_tables(command: argparse.ArgumentParser) -> None:
    rows = [1, 16, 256]
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"tokens ({spaced(rows)})")
    command.add_argument("--table-rows", type=positive, default=4_000_000, metavar="N", help="(4,000,000: 1 GB)")
    command.add_argument("--folder", type=Path, metavar="DIR", help="for the table's file (a temporary one)")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="that looks up (cuda)")


def add_compile(command: argparse.ArgumentParser) -> None:
    command.add_argument("--preset", default="flash", metavar="NAME", help="tiny, bench or flash (flash)")
    command.add_argument("--layers", type=positive, nargs="+", default=[10, 20, 40], metavar="N", help="(10 20 40)")
    add_codegen(command)


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
    where = "where Engram's are: left mapped from a file, in the host's memory, or there and read by the GPU (mapped)"
    command.add_argument("--tables", choices=TABLES, default="mapped", help=where)
    command.add_argument("--compare-eager", action="store_true", help="feed eager's tokens to both and compare")
    command.add_argument("--json", action="store_true", help="print the facts as JSON")


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


def spaced(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def named_size(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=NUMBER")
    return name, positive(number)


def temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command. Nothing heavy is imported before the arguments are known to be good."""
    arguments = parser().parse_args(argv)
    from v41.errors import V41Error
    from v41.model_def.errors import ModelError

    try:
        if arguments.command == "bench":
            case = import_module(f"v41.tools.bench.{arguments.case}")
            return int(case.bench_command(arguments))
        module, name = COMMANDS[arguments.command]
        return int(getattr(import_module(f"v41.tools.{module}"), name)(arguments))
    except (V41Error, ModelError) as error:
        from v41.tools.tables import WIDTH, fitted

        print("\n".join(part for line in str(error).splitlines() for part in fitted(line, WIDTH)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (what is left to flush goes nowhere)
        return 0


if __name__ == "__main__":
    sys.exit(main())
