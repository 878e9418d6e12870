"""The plain model against DeepSeek's reference forward: layer by layer from the reference's streams, then end to end.

The reference's mode sums in fp64 and rounds index scores to bf16; in it logits, picks and caches are equal bit for bit.
In its own mode the model keeps the limits that the data's README gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.golden_data import Golden, golden  # noqa: F401 (a fixture)
from tests.model_def.exact import exact, fixed_lengths
from tests.strategies.batches import poisoned
from v41.model_def import batch as batch_file
from v41.model_def import indexer
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.checkpoint import set_token_map
from v41.model_def.chunk import window_floors
from v41.model_def.config import V41Config
from v41.model_def.generation import Request, generate
from v41.model_def.indexer import Selection
from v41.model_def.mhc import boundary, entry_streams, post
from v41.model_def.model import Layer, V41ForCausalLM
from v41.model_def.quantization import FP4_RECORD, FP8_RECORD, MXFP4_RECORD
from v41.model_def.step import Step, plan_step

RUNS = {"prefill": (0, 37), **{f"decode{i}": (37 + i, 38 + i) for i in range(4)}}  # and the positions each reads
REPLAYS = {  # golden name -> the switch, and whether a prefix hit of 64 tokens comes first
    "decoder_after_source": ("after_source", False),
    "decoder_from_source": ("from_source", False),
    "encoder": ("off", True),
    "both": ("after_source", True),
}


@cache
def read_model(folder: Path, replay: str = "off") -> V41ForCausalLM:
    return V41ForCausalLM.from_checkpoint(folder, swa_bounded_replay=replay)


def model_of(data: Golden, replay: str = "off") -> V41ForCausalLM:
    model = read_model(data.folder, replay)
    set_token_map(model, data.reference["engram.token_map"])
    return model


def rounded_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Index scores with the reference's rounding points: each head's match, its weighted match and the sum, in bf16."""
    matches = torch.einsum("rqhd,red->rqhe", q, k).relu()
    return (matches * w.to(q.dtype).unsqueeze(-1)).sum(2).float()


@contextmanager
def reference_mode(config: V41Config) -> Iterator[None]:
    with torch.no_grad(), patch.object(indexer, "index_scores", rounded_scores), exact(fixed_lengths(config)):
        yield


def mode(name: str, config: V41Config) -> AbstractContextManager[object]:
    return reference_mode(config) if name == "reference" else torch.no_grad()


def run_layer(
    layer: Layer, X: Tensor, A: Tensor, step: Step, selection: Selection | None
) -> tuple[dict[str, Tensor], Selection | None]:
    """What the reference recorded of a layer, from its streams and carried mix."""
    X, attn_in, A, C, B = boundary(X, None, None, None, A, layer.attn_mix)
    attn_out, selection = layer.attn(attn_in, step, selection)
    X, ffn_in, A, C, B = boundary(X, attn_out, C, B, A, layer.ffn_mix)
    ffn_out = layer.ffn(ffn_in)
    values = {"attn.in": attn_in, "attn.out": attn_out, "ffn.in": ffn_in, "ffn.out": ffn_out}
    return {**values, "x_out": post(X, ffn_out, C, B), "pre_out": A}, selection


def forced_runs(data: Golden, check: Callable[[str, int, dict[str, Tensor], Selection | None], None]) -> Cache:
    """Every layer of prefill and decode fed with the reference's input; `check` sees what each returns."""
    model, ids, config = model_of(data), data("ids").tolist(), data.config
    cache = Cache.zeros(config, 2, config.max_position_embeddings)
    for run, (start, stop) in RUNS.items():
        batch, selection = build_batch(config, cache, [Chunk(ids, start, 1, stop)]), None
        step = plan_step(batch, cache, config.sliding_window, model.window_freqs, model.compressed_freqs)
        for i, layer in enumerate(model.layers):
            X, A = data(f"{run}.L{i}.x_in"), data(f"{run}.L{i}.pre_in")
            values, selection = run_layer(layer, X, A, step, selection)
            check(run, i, values, selection)
    return cache


def entry_numbers(data: Golden, run: str, layer: int) -> Tensor:
    """The reference's picks as entry numbers: it counts behind the prompt's window keys, or behind the ring."""
    places, behind = data(f"{run}.L{layer}.topk.idx").long(), data.config.sliding_window
    start, stop = RUNS[run]
    return torch.where(places < 0, -1, places - (stop if start == 0 else behind))


def test_layers_in_the_reference_mode(golden: Golden) -> None:  # noqa: F811
    picked = 0

    def check(run: str, i: int, values: dict[str, Tensor], selection: Selection | None) -> None:
        nonlocal picked
        for name, value in values.items():
            theirs = golden(f"{run}.L{i}.{name}").view_as(value)
            differ = (value != theirs).sum().item()
            assert differ == 0 or (name in ("x_out", "pre_out") and differ <= 20), (run, i, name, differ)
            assert relative(value, theirs) <= 1e-4, (run, i, name)
        if f"{run}.L{i}.topk.idx" in golden.reference:
            assert selection is not None and torch.equal(selection.picks, entry_numbers(golden, run, i)), (run, i)
            picked += 1

    with reference_mode(golden.config):
        cache = forced_runs(golden, check)
    assert picked == len(RUNS) * len(golden.config.index_source_layer_ids)
    caches_are_equal(golden, cache, "decode3")


def caches_are_equal(data: Golden, cache: Cache, run: str) -> None:
    stop = RUNS[run][1]
    for i in range(data.config.num_hidden_layers):
        assert torch.equal(FP8_RECORD.decode(cache.rings[i][1]), data(f"{run}.L{i}.ring")), i
    for source in data.config.kv_source_layer_ids:
        entries = stop // data.config.compress_ratios[source]
        stored = FP4_RECORD.decode(cache.entries[source][1, :entries])
        assert torch.equal(stored, data(f"{run}.L{source}.compress_kv")[:entries]), source
        keys = MXFP4_RECORD.decode(cache.index_keys[source][1, :entries])
        assert torch.equal(keys, data(f"{run}.L{source}.index_k")[:entries]), source


def test_latents_before_rope(golden: Golden) -> None:  # noqa: F811
    model, config, ids = model_of(golden), golden.config, golden("ids").tolist()
    cache = Cache.zeros(config, 1, 64)
    for run, (start, stop) in RUNS.items():
        step = plan_step(build_batch(config, cache, [Chunk(ids, start, 0, stop)]), cache, 16, *[torch.ones(8)] * 2)
        for source in config.kv_source_layer_ids:
            ratio, attn = config.compress_ratios[source], model.layers[source].attn  # type: ignore[index]
            with reference_mode(config):
                latents = attn.compressor(golden(f"{run}.L{source}.attn.in"), step)
            complete = latents[(torch.arange(start, stop) + 1) % ratio == 0]
            name = f"{run}.L{source}.latent.pre_rope"
            assert (name in golden.reference) == bool(len(complete))
            assert not len(complete) or torch.equal(complete, golden(name).view_as(complete)), name


def test_layers_in_the_models_own_mode(golden: Golden) -> None:  # noqa: F811
    def check(run: str, i: int, values: dict[str, Tensor], selection: Selection | None) -> None:
        assert relative(values["x_out"], golden(f"{run}.L{i}.x_out")) <= 3e-4, (run, i)

    with torch.no_grad():
        forced_runs(golden, check)


@pytest.mark.parametrize("name", ["reference", "own"])
def test_logits_of_prefill_decode_and_the_whole(golden: Golden, name: str) -> None:  # noqa: F811
    model, config, ids = model_of(golden), golden.config, golden("ids").tolist()
    cache = Cache.zeros(config, 2, 96)
    with mode(name, config):
        for run, (start, stop) in {**RUNS, "full": (0, 96)}.items():
            logits = model(build_batch(config, cache, [Chunk(ids, start, 1, stop)]), cache)
            check_logits(name, logits, golden(f"{run}.logits"))
            if name == "reference" and run == "decode3":
                caches_are_equal(golden, cache, run)


@pytest.mark.parametrize("name", ["reference", "own"])
@pytest.mark.parametrize("replay", REPLAYS)
def test_logits_of_replays(golden: Golden, replay: str, name: str) -> None:  # noqa: F811
    switch, after_hit = REPLAYS[replay]
    model, ids = model_of(golden, switch), golden("ids").tolist()
    config, hit, window = model.config, int(golden.meta["encoder_hit_tokens"]), golden.config.sliding_window
    cache = Cache.zeros(config, 1, 96)
    with mode(name, config):
        if after_hit:
            exact_model = model_of(golden)
            exact_model(build_batch(exact_model.config, cache, [Chunk(ids, 0, 0, hit)]), cache)
            for ring in cache.rings:  # the hit brings entries, no window keys
                ring.fill_(0xFF)
        start = hit - window if after_hit else 0
        chunk = Chunk(ids, start, 0, 96, hit=hit if after_hit else 0)
        check_logits(name, model(build_batch(config, cache, [chunk]), cache), golden(f"replay.{replay}.logits"))


SERVED = {  # golden name; the switch, tokens of the prompt, rows of it in a step, and how many another request has read
    "chunks of 7": ("full", "off", 96, 7, 0),
    "chunks of a window and one": ("full", "off", 96, 17, 0),
    "chunks, then one by one": ("full", "off", 92, 60, 0),
    "chunks that bounded replay leaves whole": ("full", "after_source", 96, 16, 0),
    "bounded replay": ("replay.decoder_after_source", "after_source", 96, 96, 0),
    "bounded replay, source too": ("replay.decoder_from_source", "from_source", 96, 96, 0),
    "a hit": ("replay.encoder", "off", 96, 48, 64),
    "a hit in chunks": ("replay.encoder", "off", 96, 22, 64),
    "a hit, then one by one": ("replay.encoder", "off", 92, 30, 64),
    "a hit and bounded replay": ("replay.both", "after_source", 96, 48, 64),
}


def served(data: Golden, switch: str, prompt: int, chunk: int, known: int) -> Tensor:
    """Logits behind the 96 tokens, by the generation that serves requests, in the reference's mode.

    The request waits until a slot is free; another one, which still runs, has then read its first `known` tokens.
    """
    model, ids = model_of(data, switch), data("ids").tolist()
    before = [Request.forced(ids[: known + 3], known), Request.forced([7] * known + [8], known)] if known else []
    requests = [*before, Request.forced([*ids, 0], prompt)]
    cache = poisoned(model.config, max(len(before), 1), 96)
    with reference_mode(model.config):
        steps = list(generate(model, model.config, cache, requests, chunk=chunk, reuse=True))
    assert requests[-1].hit == known
    *_, last = (step for step in steps if len(before) in step.requests)
    return last.logits[last.requests.index(len(before))]


QUICK = ("bounded replay", "a hit in chunks", "a hit and bounded replay")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in QUICK)) for c in SERVED])
def test_logits_by_the_serving_path(golden: Golden, case: str) -> None:  # noqa: F811
    name, *how = SERVED[case]
    check_logits("reference", served(golden, *how), golden(f"{name}.logits"))


@pytest.mark.parametrize("case", ["bounded replay", "bounded replay, source too", "a hit"])
@pytest.mark.parametrize("shift", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_the_serving_path_sees_a_floor_one_off(golden: Golden, case: str, shift: int) -> None:  # noqa: F811
    def shifted(config: V41Config, chunk: Chunk) -> tuple[int, int]:
        floor, late = window_floors(config, chunk)
        return floor + shift * (floor > 0), late + shift * (late > 0)

    name, *how = SERVED[case]
    with patch.object(batch_file, "window_floors", shifted):
        assert not torch.equal(served(golden, *how), golden(f"{name}.logits").flatten())


def test_layers_of_a_prefill_of_all_tokens(golden: Golden) -> None:  # noqa: F811
    """96 rows: six windows, 48 groups. A layer's input is what the reference gave out one layer before."""
    model, config, ids = model_of(golden), golden.config, golden("ids").tolist()
    cache = Cache.zeros(config, 1, 96)
    selection: Selection | None = None
    with reference_mode(config):
        batch = build_batch(config, cache, [Chunk(ids, 0, 0)])
        step = plan_step(batch, cache, config.sliding_window, model.window_freqs, model.compressed_freqs)
        X, A = entry_streams(model.embed(batch.tokens), config.hc_mult)
        for i, layer in enumerate(model.layers):
            X = X if layer.engram is None else layer.engram(X, batch.lookback)
            values, selection = run_layer(layer, X, A, step, selection)
            X, A = golden(f"full.L{i}.x_out"), golden(f"full.L{i}.pre_out")
            assert (values["x_out"] != X).sum() <= 20 and relative(values["x_out"], X) <= 1e-4, i
            if f"full.L{i}.topk.idx" in golden.reference:
                places = golden(f"full.L{i}.topk.idx").long()
                assert selection is not None
                assert torch.equal(selection.picks, torch.where(places < 0, -1, places - 96)), i


def check_logits(name: str, logits: Tensor, theirs: Tensor) -> None:
    theirs = theirs.view_as(logits)
    if name == "reference":
        assert torch.equal(logits, theirs), (logits - theirs).abs().max()
    else:
        assert 0 < kl(theirs, logits) <= 0.02


def kl(p: Tensor, q: Tensor) -> float:
    return float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum())


def relative(value: Tensor, reference: Tensor) -> float:
    value, reference = value.double(), reference.double().view_as(value)
    return float((value - reference).norm() / reference.norm())
