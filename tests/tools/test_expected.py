"""What a step of a config consists of is what the passes find in it, and a difference is told, by name."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import Phase, given, settings

from tests.strategies.configs import configs
from tests.tools.perturbed import plain
from v41.model_def.config import V41Config
from v41.passes import outline_gate
from v41.report import PassRun
from v41.tools.cli import main
from v41.tools.expected import differences, regions_expected, regions_found
from v41.tools.inspect import capture

FEW = settings(max_examples=settings.default.max_examples // 8, phases=[Phase.generate])  # each captures a model


@given(configs())
def test_every_role_of_a_layer_asks_for_its_regions(config: V41Config) -> None:
    """Counted a layer at a time, as the roles tell them."""
    wanted = regions_expected(config)
    norms = scores = pooled = engrams = 0
    for role in config.roles:
        norms += 2 + role.owns_compressor + (role.owns_compressor and role.ratio == 1)
        scores, engrams = scores + role.owns_indexer, engrams + role.engram
        pooled += role.owns_compressor and role.ratio > 1
    told = [wanted.get(name, 0) for name in ("norm_quantise", "index_scores", "compressor", "engram_lookup")]
    assert told == [norms, scores, pooled, engrams]
    assert {wanted[name] for name in ("moe_gate", "experts", "attention", "output_projection")} == {len(config.roles)}
    assert 0 not in wanted.values()


def test_a_difference_is_told_by_name() -> None:
    runs = [PassRun("a", [], 0, 0, 0.0, made={"x": 1, "y": 2}), PassRun("b", [], 0, 0, 0.0, made={"x": 1})]
    assert regions_found(runs) == {"x": 2, "y": 2}
    assert differences(regions_found(runs), {"x": 2, "y": 2}) == []
    told = ["x: 2 found, 3 by the config", "z: 0 found, 1 by the config", "y: 2 found, 0 by the config"]
    assert differences(regions_found(runs), {"x": 3, "z": 1}) == told


def test_the_passes_find_all_of_bench() -> None:
    """Its late layers are in two levels, and both run bodies of one name; its candidates are chosen before the second,
    from scores of the first."""
    passes = capture(plain(V41Config.preset("bench"))).report.passes
    assert differences(regions_found(passes), regions_expected(V41Config.preset("bench"))) == []


@pytest.mark.slow
@FEW
@given(configs(max_layers=3, sliding_window=4))  # over a window of one key nothing is left of a softmax to find
def test_the_passes_find_what_a_config_asks_for(config: V41Config) -> None:
    torch._dynamo.reset()
    passes = capture(plain(config)).report.passes
    assert differences(regions_found(passes), regions_expected(config)) == []


@pytest.mark.slow
def test_strictly_a_gate_that_nobody_saw_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No pass failed and no site was refused: the config alone tells."""
    monkeypatch.setattr(outline_gate, "find_sites", lambda gm: [])
    torch._dynamo.reset()
    assert main(["inspect", "--preset", "tiny", "--layers", "1", "--json", "--strict"]) == 1
    told = json.loads(capsys.readouterr().out)
    (line,) = differences(told["regions"]["found"], told["regions"]["by_config"])
    assert line == "moe_gate: 0 found, 1 by the config"
