"""bench_arguments: what each case of `v41 bench` takes. Nothing heavy is imported here: help comes at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from v41.options import CODEGENS
from v41.tools.arguments import PRESETS, add_codegen, add_codegens, add_json, add_reading, positive, spaced


def add_bench(command: argparse.ArgumentParser) -> None:
    command.description = "Measures and checks, most of it on a GPU alone, and keeps the figures as JSON."
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
    head = cases.add_parser("head", help="logits: a product with long sums, at released widths")
    rows = [1, 16, 64, 256, 1024]
    head.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    sorts, rows = cases.add_parser("sorts", help="picks of experts, put in order"), [1, 16, 64, 256, 682]
    sorts.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"tokens ({spaced(rows)})")
    agreement = cases.add_parser("agreement", help="whole models against eager, every codegen, beside an fp64 run")
    add_reading(agreement)
    add_codegens(agreement)
    capacity = cases.add_parser("capacity", help="time and bytes of a step at 1 and 64 fold cache capacity")
    add_codegens(capacity)
    program = cases.add_parser("program", help="whole steps: v41 against eager and the modes of torch.compile")
    add_program(program)
    add_sharded(sharded := cases.add_parser("sharded", help="decode steps that ranks share, their sums fused or not"))
    add_alone(alone := cases.add_parser("alone", help="rows of decode steps, bit by bit: alone and among others"))
    add_overlap(overlap := cases.add_parser("overlap", help="decode steps with side streams against one stream"))
    add_prefill(prefill := cases.add_parser("prefill", help="prompts with late layers on all rows, and on those read"))
    add_tables(tables := cases.add_parser("tables", help="Engram look-ups in tables of the host: mapped, pinned"))
    add_compile(compiled := cases.add_parser("compile", help="what capturing a model costs, by phase and by layers"))
    made = (boundary, rowwise, attention, index, allreduce, experts, agreement, capacity, program, overlap, prefill)
    for case in (*made, head, sorts, sharded, alone, tables, compiled):
        figures, told = case.add_mutually_exclusive_group(), "for the JSON (a new one in tools/bench/results/)"
        figures.add_argument("--out", type=Path, metavar="FILE", help=told)
        add_json(figures)


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
    rows, names = [1, 16, 64, 1024, 4096], ["generated", "in place", "eager", "compile", "max-autotune"]
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    command.add_argument("--contenders", choices=names, nargs="+", default=names, metavar="NAME",
                         help=f"({spaced(names)}); in place: ours, of records in caches")  # fmt: skip
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
    rows, weights = [1, 16, 64, 256], ["bf16", "packed"]
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"tokens ({spaced(rows)})")
    command.add_argument("--weights", choices=weights, nargs="+", default=weights, metavar="KIND",
                         help=f"how weights are held ({spaced(weights)})")  # fmt: skip


def add_allreduce(command: argparse.ArgumentParser) -> None:
    modes = "bench: times (the default); check: values, bits, replays with ranks adrift, a rank that stays away"
    command.add_argument("mode", nargs="?", choices=("bench", "check"), default="bench", help=modes)
    rows, cases = [1, 2, 5, 16, 40, 64, 256, 1024, 4096], ["critical", "seam", "residual", "combine"]
    command.add_argument("--ranks", type=positive, nargs="+", default=[2], metavar="N",
                         help="of a group, one group after the other (2); under torchrun, its own")  # fmt: skip
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    command.add_argument("--cases", choices=cases, nargs="+", default=cases, metavar="NAME", help=f"({spaced(cases)})")
    command.add_argument("--replays", type=positive, metavar="N",
                         help="calls in graphs (10000; 500 where ranks share a GPU)")  # fmt: skip
    command.add_argument("--budget", type=float, default=400, help="seconds after which nothing starts (400)")


def add_program(command: argparse.ArgumentParser) -> None:
    rows, prefill = [1, 16, 64, 256], [1024, 8192]
    default = ["eager", "v41", "v41-uncaptured", "reduce-overhead", "compile"]
    command.add_argument("--preset", default="bench", metavar="NAME", help=f"{PRESETS} (bench)")
    command.add_argument("--cut", action="store_true", help="four layers of it, one of each kind")
    command.add_argument("--rows", type=positive, nargs="*", default=rows, metavar="N",
                         help=f"of steps that decode ({spaced(rows)}); none leaves them out")  # fmt: skip
    command.add_argument("--prefill", type=positive, nargs="*", default=prefill, metavar="N",
                         help=f"rows of steps that read ({spaced(prefill)}); none leaves them out")  # fmt: skip
    command.add_argument("--context", type=positive, nargs="+", default=[4096], metavar="N",
                         help="tokens of each request that decodes; several: steps of each (4096)")  # fmt: skip
    command.add_argument("--contenders", choices=[*default, "max-autotune"], nargs="+", default=default, metavar="NAME",
                         help=f"{spaced(default)} (these), max-autotune")  # fmt: skip
    command.add_argument("--codegen", choices=CODEGENS, default="auto", help="how v41's pieces run (auto)")
    command.add_argument("--budget", type=float, default=480, help="seconds after which nothing starts (480)")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: all but the times (cuda)")


def add_sharded(command: argparse.ArgumentParser) -> None:
    rows, default = [1, 16, 64, 256], ["fused", "library", "reduce-overhead"]
    command.add_argument("--preset", default="bench", metavar="NAME", help=f"{PRESETS} (bench)")
    command.add_argument("--cut", action="store_true", help="four layers of it, one of each kind")
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N",
                         help=f"of steps that decode ({spaced(rows)})")  # fmt: skip
    command.add_argument("--context", type=positive, default=4096, metavar="N", help="tokens of each request (4096)")
    command.add_argument("--contenders", choices=[*default, "compile", "max-autotune"], nargs="+", default=default,
                         metavar="NAME", help=f"{spaced(default)} (these), compile, max-autotune")  # fmt: skip
    command.add_argument("--codegen", choices=CODEGENS, default="auto", help="how v41's pieces run (auto)")
    command.add_argument("--stress", type=int, default=10_000, metavar="N",
                         help="steps of the fewest rows while ranks drift apart; 0: none (10000)")  # fmt: skip
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


def add_alone(command: argparse.ArgumentParser) -> None:
    command.add_argument("--preset", default="bench", metavar="NAME", help=f"{PRESETS} (bench)")
    command.add_argument("--cut", action="store_true", help="four layers of it, one of each kind")
    command.add_argument("--rows", type=positive, default=64, metavar="N", help="of the step (64)")
    command.add_argument("--context", type=positive, default=4096, metavar="N", help="tokens of each request (4096)")
    command.add_argument("--codegen", choices=CODEGENS, default="auto", help="how pieces run (auto)")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the ATen nodes (cuda)")


def add_overlap(command: argparse.ArgumentParser) -> None:
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    command.add_argument("--preset", default="bench", metavar="NAME", help=f"{PRESETS} (bench)")
    command.add_argument("--cut", action="store_true", help="four layers of it, one of each kind")
    command.add_argument("--rows", type=positive, nargs="+", default=rows, metavar="N", help=f"({spaced(rows)})")
    command.add_argument("--context", type=positive, default=4096, metavar="N", help="tokens of each request (4096)")
    command.add_argument("--codegen", choices=CODEGENS, default="auto", help="how pieces run (auto)")
    way = command.add_mutually_exclusive_group()
    way.add_argument("--stress", type=positive, metavar="N", help="then decode so many steps, streams delayed")
    way.add_argument("--sites", action="store_true", help="measure and keep what each site gains in whole steps")
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
    command.set_defaults(codegen="triton")
