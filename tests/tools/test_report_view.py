"""A report shows every fact it holds, aligned, and nothing it does not; JSON has the same fields."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from io import StringIO

from rich.console import Console

from tests.tools.printed import printed
from v41.passes.pipeline import PIPELINE
from v41.regions import Region
from v41.report import CompileReport, Decision, PassRun
from v41.tools.report_view import as_json, passes_table, show

LINE = "model_def/mhc.py:31  m = m / (m.sum(-1) + eps) [sic]"


def report() -> CompileReport:
    region = Region("sinkhorn", {"steps": 39, "eps": 1e-6})
    refusals = [Decision(False, f"div_{i}", LINE, "keeps one eps", f"add_{i}") for i in (7, 8)]
    folded = [Decision(True, "sinkhorn_0", LINE, region=region), *refusals]
    return CompileReport(
        options={"codegen": ("eager", "auto: Inductor drops bf16 casts here")},
        passes=[
            PassRun("canonicalize", [], 22310, 17640, 41.4),
            PassRun("fold_sinkhorn", folded, 17640, 8360, 96.0, warning="fewer sites than layers"),
            PassRun("outline_mhc", [], 8360, 8360, 1.0, failure="KeyError: val"),
        ],
        pieces=12,
        artifacts=5,
        kernels={"mhc_boundary_7f3a91": ["piece_1", "piece_3"]},
        fallbacks=["piece_3 as eager: Inductor raised NotImplementedError: no [fp4]"],
        cache="hit 7f3a9100: spared 31.2 s of compiling",
        graph_break="Tensor.item() at model_def/batch.py:7",
        seconds={"passes": 1.25, "codegen": 30.0},
    )


def shown_fields(kind: type) -> set[str]:
    """Not the programs and plans, which have their own text."""
    return {field.name for field in fields(kind) if field.repr}


def shown(*reports: CompileReport) -> list[str]:
    console = Console(width=120, file=StringIO())
    show(console, reports)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_tables() -> None:
    assert shown(report()) == """\
pass               sites  applied  refused           nodes    ms
canonicalize           -        -        -  22310 -> 17640    41
fold_sinkhorn          3        1        2  17640 ->  8360    96
outline_mhc (off)      -        -        -   8360 ->  8360     1
between passes         -        -        -               -  1112
refused  fold_sinkhorn, 2 sites: "keeps one eps"; first at div_7, broken by add_7
         model_def/mhc.py:31  m = m / (m.sum(-1) + eps) [sic]
warning  fold_sinkhorn: fewer sites than layers
failed   outline_mhc: KeyError: val

pieces  artifacts  shared  kernels  fallbacks  breaks  recompiles
    12          5       7        1          1       1           -

passes s  codegen s
     1.2       30.0
cache    hit 7f3a9100: spared 31.2 s of compiling
fallback piece_3 as eager: Inductor raised NotImplementedError: no [fp4]
break    Tensor.item() at model_def/batch.py:7

kernel               pieces
mhc_boundary_7f3a91       2

option   value  set by
codegen  eager  auto: Inductor drops bf16 casts here""".splitlines()


def test_names_of_passes_stay_whole_beside_the_numbers_of_40_layers() -> None:
    sizes = {f"{what}_{when}": 38565 for what in ("nodes", "launches") for when in ("before", "after")}
    sizes |= dict(regions_before=426, regions_after=426)
    longest = max((each.name for each in PIPELINE), key=len)
    run = replace(PassRun(longest, [Decision(True, "a", "m.py:1")] * 400, 0, 0, 12345.0), **sizes)
    table = printed(passes_table([run], sizes=True, seconds=199.0))  # as on a machine that has much else to do
    assert len(table) == 3 and table[1].startswith(f"{longest} ") and max(map(len, table)) <= 100
    assert "38565->38565" in table[1] and "426 -> 426" in table[1]
    small = replace(run, **dict.fromkeys(sizes, 421))
    assert "421 -> 421" in printed(passes_table([small], sizes=True))[1]


def test_several_graphs_are_numbered_and_a_clean_one_is_quiet() -> None:
    lines = shown(CompileReport(), CompileReport(recompiles=1))
    assert [line for line in lines if line.startswith("graph")] == ["graph 1 of 2", "graph 2 of 2"]
    assert not [line for line in lines if line.startswith(("refused", "warning", "failed", "fallback ", "break "))]


def test_no_report_is_no_silence() -> None:
    assert shown() == ["nothing was compiled"]


def test_json_has_every_field() -> None:
    (made,) = json.loads(json.dumps(as_json([report()])))
    assert set(made) == shown_fields(CompileReport) | {"borders", "rounding"}
    fold = made["passes"][1]
    assert set(fold) == shown_fields(PassRun) | {"applied", "refused"}
    assert (fold["applied"], fold["refused"], len(fold["decisions"])) == (1, 2, 3)
    assert set(fold["decisions"][0]) == shown_fields(Decision)
    assert fold["decisions"][0]["region"] == {"kind": "sinkhorn", "attrs": {"steps": "39", "eps": "1e-06"}}
    assert made["options"]["codegen"] == {"value": "eager", "set_by": "auto: Inductor drops bf16 casts here"}
