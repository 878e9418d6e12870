"""Reports reach every collector around, programs only where they are asked for, and a source line is the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

import v41
from tests.strategies.tracing import trace
from v41 import backend
from v41.lowering.grouped_products import MEAN
from v41.lowering.rewrites import Rewrites
from v41.lowering.short_sorts import MOST
from v41.passes.structure import structure_key
from v41.report import CompileReport, Decision, PassRun, programs_wanted, publish, refused, source_of
from v41.runtime.all_kept import AllKept
from v41.runtime.executor import eager_artifact


def test_every_collector_around_gets_a_report() -> None:
    publish(CompileReport())
    with v41.collect() as outer:
        publish(first := CompileReport())
        with v41.collect(programs=True) as inner:
            assert programs_wanted()
            publish(second := CompileReport(pieces=2))
        assert not programs_wanted()
    assert outer == [first, second] and inner == [second]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Decoder(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].tanh()


@torch.no_grad()
def test_what_dynamo_gives_up_has_a_report_in_its_place() -> None:
    x = torch.randn(2, 3, 4)
    encoder, decoder = (torch.compile(model, backend="v41") for model in (Encoder(), Decoder()))
    double = torch.compile(lambda x: x * 2, backend="v41", options={"codegen": "eager"})
    with v41.collect() as outer:
        encoder(x)
        with v41.collect() as inner:
            double(x)
        assert [report.given_up is None for report in outer] == [False, True]
        decoder(x)
        encoder(x)  # given up for good: Dynamo does not try again
    assert [report.pieces for report in outer] == [0, 1, 0] and len(inner) == 1
    for report in (outer[0], outer[2]):
        why, at = str(report.given_up).splitlines()
        assert "LSTM" in why and "v41/test_report.py" in at and at.endswith("forward")


@torch.no_grad()
def test_past_the_limit_of_recompiles_a_report_says_so() -> None:
    function = torch.compile(lambda x, text: x + len(text), backend="v41", options={"codegen": "eager"})
    with v41.collect() as reports, torch._dynamo.config.patch(recompile_limit=2):
        for text in ("", "a", "bb", "ccc"):
            function(torch.ones(2), text)
    assert [report.given_up is None for report in reports] == [True, True, False]
    assert "recompile limit" in str(reports[-1].given_up)


def test_an_error_that_is_raised_is_nothing_given_up() -> None:
    function = torch.compile(lambda x: x * 2, backend="v41", options={"codegen": "none"})
    with v41.collect() as reports, pytest.raises(BackendCompilerFailed, match="InvalidOptionValue"):
        function(torch.ones(2))
    assert reports == []


def test_a_pass_counts_its_decisions() -> None:
    sites = [Decision(True, "a", "x"), Decision(False, "b", "x", "rule", "c"), Decision(True, "d", "x")]
    run = PassRun("fold", sites, 9, 5, 0.1)
    assert (run.applied, run.refused) == (2, 1)


def test_a_refusal_names_rule_node_and_line() -> None:
    gm = trace(lambda x: x.relu() + 1, torch.randn(2, 2))
    relu, add = (next(n for n in gm.graph.nodes if n.name.startswith(name)) for name in ("relu", "add"))
    decision = refused(add, "is read once", relu)
    assert (decision.node, decision.culprit, decision.rule) == (add.name, "relu", "is read once")
    assert decision.source.startswith("v41/test_report.py:") and "x.relu() + 1" in decision.source
    assert source_of(gm.graph.output_node()) == "unknown"
    assert structure_key(gm)


class Telling:
    """An artifact that tells what one of Inductor's does on a GPU."""

    rewrites, granted = Rewrites(orders=1, sorts=4, products=2, grouped=3), ("u0 > 1",)

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


def telling(body: GraphModule, of_rows_kept: bool) -> Any:
    """What runs `body`; of_rows_kept: one of two that do, as in a piece that takes rows where some are left out."""
    one = Telling(eager_artifact(body))
    inputs = len(body.graph.find_nodes(op="placeholder"))
    return AllKept(-1, (), (None,), range(inputs), one, Telling(eager_artifact(body))) if of_rows_kept else one


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_told_of_products_sorts_and_sizes_comes_back_from_the_cache(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backend, "eager_artifact", lambda body: telling(body, times == 2))
    found = []
    for _ in range(2):
        torch.compiler.reset()
        x = torch.ones(3, 2)
        torch._dynamo.decorators.mark_unbacked(x, 0, shape_id="rows")
        with torch.no_grad(), v41.collect() as reports:
            torch.compile(lambda x: x * 2, backend="v41", options={"codegen": "eager"})(x)
        found += reports
    assert [report.cache.split()[0] for report in found] == ["miss:", "hit"]
    names = ("products", "grouped products", "orders of orders", "sorts", "granted")
    assert [tuple(report.options[name][0] for name in names) for report in found] == [
        (
            f"{2 * times} of widened 16-bit floats take them as they are",
            f"{3 * times} have a kernel for up to {MEAN} rows a group",
            f"{1 * times} written as the inverse of the order",
            f"{4 * times} have a kernel for up to {MOST} integers",
            "rows > 1",
        )
    ] * 2
