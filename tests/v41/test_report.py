"""Reports reach every collector around, programs only where they are asked for, and a source line is the model's."""

from __future__ import annotations

import torch

import v41
from tests.strategies.tracing import trace
from v41.passes.structure import structure_key
from v41.report import CompileReport, Decision, PassRun, programs_wanted, publish, refused, source_of


def test_every_collector_around_gets_a_report() -> None:
    publish(CompileReport())
    with v41.collect() as outer:
        publish(first := CompileReport())
        with v41.collect(programs=True) as inner:
            assert programs_wanted()
            publish(second := CompileReport(pieces=2))
        assert not programs_wanted()
    assert outer == [first, second] and inner == [second]


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
