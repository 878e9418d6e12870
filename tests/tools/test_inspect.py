"""A perturbed layer shows in the report of that layer and in no other; a config that is cut keeps its layers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.strategies.configs import configs
from tests.tools.perturbed import Build, plain, with_a_reader, with_another, with_numbers, with_two_collapses
from v41.model_def.config import PRESETS, V41Config
from v41.plan import Plan
from v41.tools.cli import main
from v41.tools.inspect import capture, first_layers, role
from v41.tools.inspect_changes import changes
from v41.tools.run import run_of
from v41.tools.run_folder import layer_values


def small() -> V41Config:
    """Readers behind a source, two of them like the perturbed one."""
    plan = dict(num_hidden_layers=4, compress_ratios=(1,) * 4, kv_source_layer_ids=(0,), index_source_layer_ids=(0,),
                candidate_source_layer_id=None, engram_layer_ids=(), engram_num_embeddings=())  # fmt: skip
    return V41Config(**PRESETS["tiny"] | plan)


# the model, the layer that is perturbed, and that behind which some rows of the late layers are left out
SIZES = {"small": (small(), 2, []), "flash": (V41Config.preset("flash"), 23, [29])}


def found(build: Build) -> list[dict[str, Any]]:
    """What each layer is, as --json says it."""
    torch._dynamo.reset()
    inspection = capture(build)
    assert [run.failure for run in inspection.report.passes if run.failure] == []
    return layer_values(run_of(inspection, "perturbed"))


def brief(text: str) -> str:
    """Without how many pieces a layer has: that is partition's business."""
    return re.sub(r"(\d+) of \d+ pieces? became (\d+) others?", r"\1 -> \2 pieces", text)


class Perturbed:
    """A model, one of its layers, and what the compiler finds in it as it is."""

    def __init__(self, config: V41Config, at: int, seams: list[int]) -> None:
        self.config, self.at, self.seams = config, at, seams
        self.before = found(plain(config))

    def changes(self, build: Build, *, ends: bool = False) -> list[str]:
        """What differs in the perturbed layer. Nothing may elsewhere, save, where something goes on to the `ends`, one
        piece there, and at each seam that takes its rows those that hand it over."""
        told = changes(self.before, found(build))
        elsewhere = {layer: brief(text) for layer, text in told if layer != self.at}
        assert [layer for layer, _ in told if layer != self.at] == [None, *self.seams] * ends == [*elsewhere]
        assert elsewhere.pop(None, "1 -> 1 pieces") == "1 -> 1 pieces"
        assert all(re.fullmatch(r"([12]) -> \1 pieces", text) for text in elsewhere.values())
        assert self.at in {layer for layer, _ in told}
        return [brief(text) for layer, text in told if layer == self.at]


@pytest.fixture(scope="module", params=SIZES)
def model(request: pytest.FixtureRequest) -> Perturbed:
    return Perturbed(*SIZES[request.param])


BOTH, ITS = ("mhc_boundary 1 of 2", "mhc_boundary 2 of 2"), "sinkhorn {'first_axis': -2, 'steps': 39, 'eps': 1e-06}"


@pytest.mark.slow
def test_another_eps_shows_at_the_two_sites_of_the_layer(model: Perturbed) -> None:
    assert model.changes(with_numbers(model.config, model.at, hc_eps=1e-3)) == [
        *(
            f"{site}: {was} -> {now}"
            for site in BOTH
            for was, now in (
                ("pre (1.0, 1e-06)", "(1.0, 0.001)"),
                ("head ('softmax', -1, 1e-06)", "('softmax', -1, 0.001)"),
                (ITS, "{'first_axis': -2, 'steps': 39, 'eps': 0.001}"),
            )
        ),
        "2 -> 2 pieces",
    ]


@pytest.mark.slow
def test_other_iterations_show_at_the_two_sites_of_the_layer(model: Perturbed) -> None:
    assert model.changes(with_numbers(model.config, model.at, hc_iters=7)) == [
        *(f"{site}: {ITS} -> {{'first_axis': -2, 'steps': 13, 'eps': 1e-06}}" for site in BOTH),
        "2 -> 2 pieces",
    ]


@pytest.mark.slow
def test_another_reader_shows_at_the_site_it_reads_from_alone(model: Perturbed) -> None:
    names, *rest = model.changes(with_a_reader(model.config, model.at), ends=True)
    five = "'input', 'pre', 'post', 'comb')"
    assert names == f"mhc_boundary 2 of 2: outputs ('streams', {five} -> ('streams', 'extra', {five}"
    assert [text.split(":")[0] for text in rest[:-1]] == [BOTH[1]] * 2  # which outputs each cone has
    assert rest[-1] == "1 -> 1 pieces"


def other_mask(layer: Any) -> None:
    layer.attn.late = not layer.attn.late


def other_ring(layer: Any) -> None:
    layer.attn.role = replace(layer.attn.role, layer=layer.attn.role.layer - 1)


def tied_norms(layer: Any) -> None:
    layer.ffn_norm.weight = layer.attn_norm.weight


@pytest.mark.slow
@pytest.mark.parametrize("change", [other_ring, tied_norms])
def test_the_same_pieces_on_other_values_show_in_the_layer(model: Perturbed, change: Callable[[Any], None]) -> None:
    told = model.changes(with_another(model.config, model.at, change))
    assert told and all(re.match(r"piece \d+ of \d+: (reads|writes) ", each) for each in told)


@pytest.mark.slow
def test_another_mask_shows(model: Perturbed) -> None:
    """In the layer, or where its rows are taken from it: late layers of a step share what they read of masks."""
    assert changes(model.before, found(with_another(model.config, model.at, other_mask)))


@pytest.mark.slow
def test_a_second_collapse_is_refused_at_its_site_alone(model: Perturbed) -> None:
    told = model.changes(with_two_collapses(model.config, model.at), ends=True)
    if model.seams:  # what is read at the end alone is collapsed there, of the rows that are left: the boundary stays
        assert told == ["regions: mhc_boundary, mhc_boundary -> mhc_boundary, mhc_boundary, norm_quantise"]
        return
    lost, *refused, _ = told
    # what the boundary held is left to others: the norms behind its collapses, one of them of a projection
    assert lost == "regions: mhc_boundary, mhc_boundary -> mhc_boundary, norm_quantise, norm_quantise, sinkhorn"
    rules = ("the streams are collapsed once, for one norm", "the row is divided by its own root mean square")
    assert [told.split('"')[1] for told in refused] == [*rules]


@pytest.mark.slow
def test_the_command_shows_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    assert main(["inspect", "--preset", "flash", "--layers", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    flash = V41Config.preset("flash")
    assert [view["role"] for view in told["layers"][1:]] == [role(flash, layer) for layer in range(3)]
    kinds = [[region["kind"] for region in view["regions"]] for view in told["layers"][1:]]
    assert kinds[0].count("mhc_boundary") == kinds[1].count("mhc_boundary") == kinds[2].count("mhc_boundary") == 2
    assert told["seconds"]["total"] > 0 and told["peak_mib"] > 0
    plan = Plan.from_json(json.dumps(told["plan"]))
    uses = [plan.names_of(piece) for piece in plan.pieces if piece.border.startswith("use of")]
    assert [len(names) > 1 for names in uses] == [True, True] and "logits" in uses[1]  # one index source, the head
    assert [piece.uncapturable for piece in plan.pieces if piece.uncapturable] == []


@given(configs())
def test_a_cut_keeps_its_layers(whole: V41Config) -> None:
    for count in range(1, whole.num_hidden_layers + 1):
        cut = first_layers(whole, count)
        assert cut.roles == whole.roles[:count]
        assert cut.boundary_sites().coefficient_sites == 2 * count
