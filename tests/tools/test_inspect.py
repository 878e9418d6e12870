"""A perturbed layer shows in the report of that layer and in no other; a config that is cut keeps its layers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.strategies.configs import configs
from v41.model_def.batch import Batch
from v41.model_def.cache import Cache
from v41.model_def.config import PRESETS, V41Config
from v41.model_def.mhc import boundary, coefficients, collapse, entry_streams, post
from v41.model_def.model import V41ForCausalLM
from v41.model_def.step import plan_step
from v41.regions import Region
from v41.tools.cli import main
from v41.tools.inspect import capture, first_layers, layers, role

PERTURBED = 2


def config() -> V41Config:
    """Readers behind a source, two of them like the perturbed one."""
    plan = dict(num_hidden_layers=4, compress_ratios=(1,) * 4, kv_source_layer_ids=(0,), index_source_layer_ids=(0,),
                candidate_source_layer_id=None, engram_layer_ids=(), engram_num_embeddings=())  # fmt: skip
    return V41Config(**PRESETS["tiny"] | plan)


class Leaky(V41ForCausalLM):
    """In one layer, what the streams collapse to in front of the experts is read again at the end."""

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        step = plan_step(batch, cache, self.config.sliding_window, self.window_freqs, self.compressed_freqs)
        X, A = entry_streams(self.embed(batch.tokens), self.config.hc_mult)
        y = B = C = selection = kept = None
        for number, layer in enumerate(self.layers):
            X, x, A, C, B = boundary(X, y, C, B, A, layer.attn_mix)
            y, selection = layer.attn(x, step, selection)
            mix, X = layer.ffn_mix, post(X, y, C, B)
            h = collapse(X, A)
            kept = h if number == PERTURBED else kept
            x, (A, C, B) = mix.norm(h), coefficients(X, mix)
            y = layer.ffn(x)
        assert kept is not None
        return self.head(self.norm(collapse(post(X, y, C, B), A)) + kept)


def found(model: Callable[[], V41ForCausalLM]) -> list[list[Region]]:
    """The regions of each layer."""
    torch._dynamo.reset()
    inspection = capture(model)
    assert [run.failure for run in inspection.report.passes if run.failure] == []
    return [view.regions for view in layers(inspection) if view.layer is not None]


@pytest.fixture(scope="module")
def plain() -> list[list[Region]]:
    return found(lambda: V41ForCausalLM(config()))


def changed(**changes: float) -> Callable[[], V41ForCausalLM]:
    def build() -> V41ForCausalLM:
        model = V41ForCausalLM(config())
        model.layers[PERTURBED].config = config().replace(**changes)  # type: ignore[index]
        return model

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [({"hc_eps": 1e-3}, "eps", 1e-3), ({"hc_sinkhorn_iters": 7}, "steps", 13)],
    ids=["eps", "iterations"],
)
def test_a_number_of_one_layer_shows_at_its_sites_alone(
    plain: list[list[Region]], changes: dict[str, float], attribute: str, value: float
) -> None:
    regions = found(changed(**changes))
    assert [i for i, (old, new) in enumerate(zip(plain, regions, strict=True)) if old != new] == [PERTURBED]
    assert len(regions[PERTURBED]) == len(plain[PERTURBED]) == 2
    assert all(region.attrs["sinkhorn"][attribute] == value for region in regions[PERTURBED])


@pytest.mark.slow
def test_another_reader_shows_at_the_site_it_reads_from_alone(plain: list[list[Region]]) -> None:
    regions = found(lambda: Leaky(config()))
    assert [i for i, (old, new) in enumerate(zip(plain, regions, strict=True)) if old != new] == [PERTURBED]
    (_, was), (same, now) = plain[PERTURBED], regions[PERTURBED]
    assert same == plain[PERTURBED][0] and now != was
    assert set(now.attrs["outputs"]) - set(was.attrs["outputs"]) == {"extra"}


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


@given(configs())
def test_a_cut_keeps_its_layers(whole: V41Config) -> None:
    for count in range(1, whole.num_hidden_layers + 1):
        cut = first_layers(whole, count)
        assert cut.roles == whole.roles[:count]
        assert cut.boundary_sites().coefficient_sites == 2 * count

