"""Bodies that layers share are traced once, whatever the number of layers, and never stand in for one that differs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import PRESETS, V41Config
from v41.model_def.model import V41ForCausalLM
from v41.regions import invoke_subgraph


def like_layers(count: int, **changes: Any) -> V41Config:
    """A source of ratio 1, its readers behind it."""
    plan = dict(num_hidden_layers=count, compress_ratios=(1,) * count, kv_source_layer_ids=(0,),
                index_source_layer_ids=(0,), candidate_source_layer_id=None, engram_layer_ids=(),
                engram_num_embeddings=())  # fmt: skip
    return V41Config(**PRESETS["tiny"] | plan | changes)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Dynamo compiles one function eight times at most, and other tests of this process may have."""
    torch._dynamo.reset()


def run(model: V41ForCausalLM, backend: Any) -> torch.Tensor:
    cache = Cache.zeros(model.config, 2, 32)
    batch = build_batch(model.config, cache, [Chunk(list(range(7)), 0, 1), Chunk(list(range(3)), 0, 0)])
    options = {"codegen": "eager"} if backend == "v41" else None
    function = torch.compile(model, backend=backend, fullgraph=True, options=options) if backend else model
    with torch.no_grad():
        return function(batch, cache)


def calls_of(model: V41ForCausalLM) -> Counter[str]:
    """Body -> how often Dynamo's graph calls it."""
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    run(model, backend)
    (gm,) = graphs
    return Counter(str(node.args[0].target) for node in gm.graph.nodes if node.target is invoke_subgraph)


def test_like_layers_share_their_bodies() -> None:
    """Into attention, out of it, experts; coefficients twice a layer. 2.11 keeps the first layer apart in two."""
    few, many = (calls_of(V41ForCausalLM(like_layers(count)).eval()) for count in (2, 4))
    assert few.total() == 10 and many.total() == 20
    assert 4 <= len(few) == len(many) <= 6


FLAWS = {
    "eps of Sinkhorn": lambda layer: setattr(layer, "hc_eps", 1e-2),
    "iterations of Sinkhorn": lambda layer: setattr(layer, "hc_iters", 3),
    "eps of a norm": lambda layer: setattr(layer.attn.q_norm, "eps", 0.5),
    "scaling of the gate": lambda layer: setattr(layer.ffn.gate, "scaling", 7.0),
    "limit of an expert": lambda layer: setattr(layer.ffn.experts, "limit", 0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_layer_that_differs_has_a_body_of_its_own(flaw: str) -> None:
    torch.manual_seed(0)
    model = V41ForCausalLM(like_layers(3)).eval()
    before = run(model, None)
    FLAWS[flaw](model.layers[1])
    expected = run(model, None)
    assert not torch.equal(expected, before), "the flaw shows in nothing"
    assert torch.equal(run(model, "v41"), expected)


IN_TURN: tuple[dict[str, Any], ...] = (  # no two are one program
    {"hc_eps": 1e-2, "swiglu_limit": 0.1},
    {"hc_eps": 1e-3, "routed_scaling_factor": 3.0, "rms_norm_eps": 0.5},
    {"hc_sinkhorn_iters": 3, "compress_rope_theta": 500.0},
)


def numbers_of(gm: GraphModule) -> set[float]:
    nodes = [node for body in gm.modules() if isinstance(body, GraphModule) for node in body.graph.nodes]
    return {arg for node in nodes for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, float)}


def test_models_of_other_numbers_are_traced_one_after_another() -> None:
    """Each has its numbers in its graph, not as inputs, and computes what it computes in eager."""
    graphs: list[GraphModule] = []
    window_only: dict[str, Any] = dict.fromkeys(("kv_source_layer_ids", "index_source_layer_ids"), ())

    def backend(gm: GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    for changes in IN_TURN:
        torch.manual_seed(0)
        model = V41ForCausalLM(like_layers(1, compress_ratios=(0,), **window_only, **changes)).eval()
        assert torch.equal(run(model, backend), run(model, None))
        wanted = {model.config.hc_eps, model.config.rms_norm_eps, model.config.swiglu_limit}
        assert wanted <= numbers_of(graphs[-1])
    assert len(graphs) == len(IN_TURN)


@pytest.mark.slow
def test_models_of_other_numbers_compile_one_after_another() -> None:
    torch.manual_seed(0)
    models = [V41ForCausalLM(like_layers(2, **changes)).eval() for changes in ({}, *IN_TURN, {})]
    models[-1].load_state_dict(models[0].state_dict())
    results = [run(model, "v41") for model in models]
    assert all(torch.equal(result, run(model, None)) for model, result in zip(models, results, strict=True))
    assert torch.equal(results[0], results[-1]) and not torch.equal(results[0], results[1])
