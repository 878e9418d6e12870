"""The plain model trimmed: logits and live slots have eager's bits in any step, captured or not, with each switch.

A step mixes chunks of 0 to 255 rows, decode steps, requests whose logits are all returned, and prefix hits.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import v41
from tests.cpu_graphs import record_captures
from tests.golden_data import Golden, golden  # noqa: F401 (a fixture)
from tests.strategies.batches import poisoned
from v41 import backend
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.chunk import inner_last, kept_last, reach
from v41.model_def.config import PRESETS, V41Config
from v41.model_def.generation import Request, generate
from v41.model_def.model import V41ForCausalLM
from v41.passes import restrict_index_scores
from v41.passes.outline_index_scores import KIND
from v41.passes.replay_seam import take_too
from v41.passes.same_values import same_bits
from v41.regions import region_of, regions
from v41.report import CompileReport
from v41.tools.expected import differences, regions_expected, regions_found

pytestmark = pytest.mark.slow
SLOTS, CAPACITY = 5, 640
REPLAYS = ("off", "after_source", "from_source")
LADDERS = Buckets(decode=(4, 8), prefill=(64, 128, 256, 512), blocks=(64, 256), kept=(16, 32, 64, 128))


def small(replay: str) -> V41Config:
    """A ratio-2 source, the last source, a layer that picks by it and one that reuses."""
    four = dict(compress_ratios=(2, 1, 1, 1), kv_source_layer_ids=(0, 1), index_source_layer_ids=(0, 1, 2))
    less = dict(num_hidden_layers=4, candidate_source_layer_id=1, engram_layer_ids=(), engram_num_embeddings=())
    return V41Config(**PRESETS["tiny"] | four | less | dict(swa_bounded_replay=replay))


@cache
def tokens() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(500) for _ in range(CAPACITY)] for _ in range(SLOTS)]


def steps(window: int) -> list[list[Chunk]]:
    """Lengths around windows, then steps that go on from there in other sizes, growing and shrinking."""
    ids, W = tokens(), window
    lengths = [
        [W - 1, 1, W + 1, 0],
        [255, 1, 2 * W - 1, W],
        [1, 1, 127, 128],
        [1, 1, 129, 1],
        [1, 1, 1, 1],
        [40, 1, 1, 3 * W],
    ]
    done, found = [0] * SLOTS, []
    for step in lengths:
        chunks = []
        for slot, rows in enumerate(step):
            chunks.append(Chunk(ids[slot], done[slot], slot, done[slot] + rows))
            done[slot] += rows
        found.append(chunks)
    every = [Chunk(ids[4], 0, 4, 90, every_logit=True), Chunk(ids[0], done[0], 0, done[0] + 100)]
    return [*found, every]


def live(cache: Cache) -> list[Tensor]:
    stored = [t[:-1, :-1] for t in (*cache.entries.values(), *cache.index_keys.values())]
    return [*(t[:-1] for t in (*cache.rings, *cache.tails.values())), *stored]


class Both:
    """A model, compiled, and the same plain: step by step, each on a cache of its own that began as NaN."""

    def __init__(self, config: V41Config, capacity: int = CAPACITY, **options: Any) -> None:
        self.config, self.model = config, V41ForCausalLM.random(config).eval()
        self.compiled = torch.compile(self.model, backend="v41", fullgraph=True, options={"cache": False, **options})
        self.ours, self.theirs = (poisoned(config, SLOTS, capacity) for _ in range(2))

    @torch.no_grad()
    def step(self, chunks: list[Chunk], buckets: Buckets | None = None, stale: int | None = None) -> int:
        """How many rows were kept. stale: rings from this layer on need not be alike, in slots that are read on."""
        theirs = build_batch(self.config, self.theirs, chunks, buckets=buckets)
        ours = build_batch(self.config, self.ours, chunks, buckets=buckets)
        expected, count = self.model(theirs, self.theirs), len(ours.host.logits)
        assert torch.equal(self.compiled(ours, self.ours)[:count], expected[:count])
        ours_left, theirs_left = (live(each)[:stale] for each in (self.ours, self.theirs))
        assert all(map(same_bits, ours_left, theirs_left))
        return len(ours.kept_rows)


def run_steps(
    replay: str, rounds: int, buckets: Buckets | None, which: slice = slice(None), **options: Any
) -> tuple[CompileReport, list[int]]:
    torch.compiler.reset()
    with v41.collect() as reports:
        both = Both(small(replay), codegen="eager", **options)
        kept = [
            both.step(chunks, buckets) for _ in range(rounds) for chunks in steps(both.config.sliding_window)[which]
        ]
    (report,) = reports
    return report, kept


@pytest.mark.parametrize("replay", REPLAYS)
def test_any_step_has_eagers_bits(replay: str) -> None:
    report, kept = run_steps(replay, 1, None, verify=True, strict=True)
    (run,) = (run for run in report.passes if run.name == "trim_replay")
    assert run.applied == 1 + (inner_last(small(replay)) is not None) and run.refused == 0
    assert differences(regions_found(report.passes), regions_expected(small(replay))) == []  # in both halves
    rows = [sum(chunk.rows for chunk in chunks) for chunks in steps(16)]
    assert all(k <= r for k, r in zip(kept, rows, strict=True)) and kept[1] < rows[1]
    assert max(kept[:-1]) <= 4 * kept_last(small(replay))
    assert report.plan is not None and any(
        n.startswith("last ") for p in report.plan.pieces for n in report.plan.names_of(p)
    )


def test_a_re_indexer_behind_the_inner_seam_scores_its_candidates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes as for a GPU, pieces as their ATen nodes. One re-indexer has the rows that its source has, one fewer: the
    inner seam takes rows of the list of candidates in place of those of their mask."""
    monkeypatch.setattr(backend, "effective_codegen", lambda *_: ("triton", "a test"))
    monkeypatch.setattr(backend, "ways", lambda *_: ("triton", "eager"))
    monkeypatch.setattr(backend, "generated", lambda *_: "")
    told: list[tuple[int, int]] = []  # results of the seam, before and after

    def taking(gm: GraphModule, seam: Node, more: Iterable[Node]) -> Node | None:
        before = len(seam.meta["val"])
        made = take_too(gm, seam, more)
        told.append((before, 0 if made is None else len(made.meta["val"])))
        return made

    monkeypatch.setattr(restrict_index_scores, "take_too", taking)
    five = dict(num_hidden_layers=5, compress_ratios=(2, 1, 1, 1, 1), index_source_layer_ids=(0, 1, 2, 4))
    with v41.collect() as reports:
        both = Both(small("off").replace(**five), verify=True, strict=True)
        for chunks in steps(both.config.sliding_window):
            both.step(chunks)
    runs = {run.name: run for run in reports[0].passes}
    assert (runs["restrict_index_scores"].applied, runs["restrict_index_scores"].refused) == (2, 0)
    assert runs["trim_replay"].applied == 2
    ((before, after),) = told
    assert before == after, "the list came, the mask stayed"
    assert reports[0].plan is not None
    scored = [region_of(call).attrs for piece in reports[0].plan.pieces for call in regions(piece.body, KIND)]
    assert {"picks", "kept_blocks"} == {role for attrs in scored for role in attrs["outputs"]}, "a mask nobody reads"


@pytest.mark.parametrize("replay", ["off", "after_source"])
def test_captured_steps_have_eagers_bits(replay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record_captures(monkeypatch)
    report, _ = run_steps(replay, 3, LADDERS, slice(0, 5))
    log = report.captures
    assert log is not None and not log.errors and not log.dropped
    lasts = {kept_last(small(replay)), inner_last(small(replay)) or kept_last(small(replay))}
    captured = {name.split("=")[0] for name in log.captured if "segment" in name}
    assert captured == {"rows", *(f"last {last}" for last in lasts)}
    assert log.replays > 0 and log.segment_replays > 0


@pytest.mark.parametrize("replay", REPLAYS)
def test_what_the_next_chunk_makes_again_is_left_out(replay: str) -> None:
    """Late rings of such a slot are stale until the next chunk has run; then all is as if nothing was left out."""
    torch.compiler.reset()
    both, ids = Both(small(replay), codegen="eager"), tokens()
    far, source = reach(both.config), both.config.last_kv_source
    kept = [
        both.step([Chunk(ids[0], 0, 0, 50, following=far), Chunk(ids[1], 0, 1, 20)], stale=source),
        both.step([Chunk(ids[0], 50, 0, 50 + far), Chunk(ids[1], 20, 1, 70, following=far)], stale=source),
        both.step([Chunk(ids[0], 50 + far, 0, 51 + far), Chunk(ids[1], 70, 1, 70 + far)]),
        both.step([Chunk(ids[0], 51 + far, 0, 52 + far), Chunk(ids[1], 70 + far, 1, 71 + far)]),
    ]
    last = kept_last(both.config)
    assert kept == [min(20, last), min(far, last), 1 + min(far, last), 2]
    alone = Both(both.config, codegen="eager")
    assert alone.step([Chunk(ids[0], 0, 0, 50, following=far)], LADDERS, stale=source) == 1


@pytest.mark.parametrize("replay", REPLAYS)
def test_of_thousands_of_rows_a_window_or_a_halo_is_kept(replay: str) -> None:
    torch.compiler.reset()
    config, ids = small(replay).replace(max_position_embeddings=2400), 4 * tokens()[0]
    both, last = Both(config, capacity=2400, codegen="eager"), kept_last(config)
    kept = [
        both.step([Chunk(ids, 0, 0, 2100), Chunk(ids, 0, 1, 1), Chunk(ids, 0, 2, 127)]),
        both.step([Chunk(ids, 2100, 0, 2101), Chunk(ids, 1, 1, 2), Chunk(ids, 127, 2, 2300)]),
    ]
    assert kept == [last + 1 + last, 1 + 1 + last]


def test_a_prefix_hit_rebuilds_rings_and_rewrites_no_entry() -> None:
    """Rows [H - W, H) run again in the step that goes on; entries of the hit keep their bits."""
    torch.compiler.reset()
    both = Both(small("after_source"), codegen="eager")
    ids, W = tokens()[0], both.config.sliding_window
    both.step([Chunk(ids, 0, 0, 200)])
    for cache_of in (both.ours, both.theirs):
        cache_of.copy_entries(0, 1, 120)
        for ring in cache_of.rings:
            ring[1] = 0xFF
    entries = [t[1, : 120 * (t.shape[1] - 1) // CAPACITY].clone() for t in both.ours.entries.values()]
    both.step([Chunk(ids, 120 - W, 1, 240, hit=120), Chunk(ids, 200, 0, 201)])
    both.step([Chunk(ids, 240, 1, 241, hit=120), Chunk(ids, 201, 0, 260)])
    for before, now in zip(entries, both.ours.entries.values(), strict=True):
        assert torch.equal(before, now[1, : len(before)])


GOLDEN = {"decoder_after_source": "after_source", "decoder_from_source": "from_source"}


@pytest.mark.parametrize("name", [*GOLDEN, "encoder", "both"])
def test_golden_replays_through_the_compiled_program(golden: Golden, name: str) -> None:  # noqa: F811
    from tests.model_def.test_model_golden import kl, model_of

    switch = GOLDEN.get(name, "after_source" if name == "both" else "off")
    model, ids = model_of(golden, switch), golden("ids").tolist()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="v41", fullgraph=True, options={"codegen": "eager", "cache": False})
    known = 64 if name in ("encoder", "both") else 0
    before = [Request.forced(ids[: known + 3], known), Request.forced([7] * known + [8], known)] if known else []
    chunk = 48 if known else 96
    logits = []
    for forward in (model, compiled):
        requests = [*before, Request.forced([*ids, 0], 96)]
        requests = [Request.forced(each.ids, each.prompt) for each in requests]
        cache_of = poisoned(model.config, max(len(before), 1), 96)
        made = list(generate(forward, model.config, cache_of, requests, chunk=chunk, reuse=True))
        *_, last = (step for step in made if len(before) in step.requests)
        logits.append(last.logits[last.requests.index(len(before))])
    assert torch.equal(*logits)
    assert kl(golden(f"replay.{name}.logits").flatten(), logits[1]) <= 0.02


def test_a_floor_one_off_is_seen(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from tests.model_def.test_model_golden import model_of
    from v41.model_def import batch as batch_file
    from v41.model_def.chunk import window_floors

    model, ids = model_of(golden, "after_source"), golden("ids").tolist()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="v41", fullgraph=True, options={"codegen": "eager", "cache": False})
    logits = []
    for shift in (0, -1):
        monkeypatch.setattr(
            batch_file, "window_floors", lambda c, k, s=shift: tuple(f + s * (f > 0) for f in window_floors(c, k))
        )
        cache_of = Cache.zeros(model.config, 1, 96)
        with torch.no_grad():
            logits.append(compiled(build_batch(model.config, cache_of, [Chunk(ids, 0, 0, 96)]), cache_of))
    assert not torch.equal(*logits)
