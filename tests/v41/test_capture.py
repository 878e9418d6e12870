"""Captured execution through torch.compile: a step in buckets has the bits of eager and one compile; reports tell.

CpuGraphs stands in for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import BackendCompilerFailed

import v41
from tests.cpu_graphs import CpuGraphs, record_captures
from tests.v41.test_model import small
from v41.errors import InvalidOptionValue, UnknownBuckets
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.generation import warm_up
from v41.model_def.model import V41ForCausalLM
from v41.options import parse
from v41.runtime.capture import borrowed
from v41.runtime.static_inputs import copies

SLOTS, WIDTH, PAD = 6, 8, 6


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CpuGraphs]]:
    """CPU graphs for every compile, and a list of them."""
    torch.compiler.reset()
    with torch.no_grad():
        yield record_captures(monkeypatch)


class Step(torch.nn.Module):
    """A cache written in place by rows, a read of it that depends on blocks, rows again."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-0.4, 0.4, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: Tensor, slots: Tensor, cache: Tensor, blocks: Tensor) -> Tensor:
        h = x @ self.w
        before = cache[slots]
        cache[slots] = h.tanh() + 0.5 * before
        keys = cache[blocks % SLOTS]
        y = ((h + before) @ keys.T).softmax(-1) @ keys
        return (y.sin() + before) @ self.w


def step(rows: int, blocks: int, pads: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, slots, range_ = torch.randn(rows, WIDTH, generator=draw), torch.arange(rows) % SLOTS, torch.arange(blocks)
    x[rows - pads :], slots[rows - pads :] = torch.nan, PAD
    for tensor, size in ((x, "rows"), (slots, "rows"), (range_, "blocks of ratio 1")):
        mark_unbacked(tensor, 0, shape_id=size)
    return x, slots, range_


def run_both(compiled: Callable[..., Tensor], plain: Step, sizes: list[tuple[int, int, int]]) -> None:
    draw, caches = torch.Generator().manual_seed(0), [torch.zeros(SLOTS + 1, WIDTH) for _ in range(2)]
    kept: list[tuple[Tensor, Tensor]] = []
    for rows, blocks, pads in sizes:
        x, slots, range_ = step(rows, blocks, pads, draw)
        ours, theirs = compiled(x, slots, caches[0], range_), plain(x, slots, caches[1], range_)
        kept.append((ours[: rows - pads], theirs[: rows - pads]))
        assert torch.equal(caches[0][:PAD], caches[1][:PAD])
        assert all(torch.equal(one, other) for one, other in kept)


def test_steps_in_buckets_are_graphs_and_have_eagers_bits(recorder: list[CpuGraphs]) -> None:
    plain = Step()
    sizes = [(rows, 2, rows // 2) for rows in (1, 2, 4, 4, 2, 1, 1, 4, 2)] + [(128, 2, 100), (256, 3, 200), (3, 2, 0)]
    with v41.collect() as reports:
        compiled = torch.compile(plain, backend="v41", fullgraph=True)
        run_both(compiled, plain, sizes + [(rows, 5, 0) for rows in (128, 256, 128, 4)])
    (report,), log = reports, reports[0].captures
    assert report.options["capture"] == ("on", "test") and log is not None and not log.errors
    assert log.captured[:3] == [f"rows={n} blocks of ratio 1=2" for n in (4, 2, 1)]
    assert log.replays == 6 and len(recorder[0].graphs) == len(log.captured)
    assert report.plan is not None and report.plan.sizes and report.plan.whole == {"rows": 256, "longest": 1}


OVERLAPPING: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "the other is returned": (lambda x, y: (x.add_(1), y)[1], lambda base: (base[:6], base[2:])),
    "both are returned, and a view": (lambda x, y: (x.add_(1), x.view(-1), y), lambda base: (base[:6], base[2:])),
    "both are written": (lambda x, y: (x.add_(1), y.mul_(2)), lambda base: (base, base[3:])),
}


@pytest.mark.parametrize("case", OVERLAPPING)
def test_results_follow_inputs_that_overlap(case: str) -> None:
    """What is returned is the caller's memory, at its place in it: it changes with every later step."""
    fn, inputs = OVERLAPPING[case]
    ours, theirs = (inputs(torch.arange(8.0)) for _ in range(2))
    with v41.collect() as reports:
        compiled, kept = torch.compile(fn, backend="v41", fullgraph=True), list[tuple[Any, Any]]()
        for _ in range(4):
            kept.append((compiled(*ours), fn(*theirs)))
            assert all(map(torch.equal, leaves(kept, 0), leaves(kept, 1))) and torch.equal(ours[0], theirs[0])
    log = reports[0].captures
    assert log is not None and log.replays == 3


def leaves(kept: list[tuple[Any, Any]], side: int) -> list[Tensor]:
    return [tensor for pair in kept for tensor in torch.utils._pytree.tree_leaves(pair[side])]


FROM_DATA: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]] = {
    "a float": (lambda y: y.sum().item(), lambda x, number: torch.add(x, x, alpha=number)),
    "one made of a float": (lambda y: y.sum().item() / 2 + 1, lambda x, number: x.clamp(max=number)),
    "one made of an int": (lambda y: y.sum().int().item() / 2, lambda x, number: x * number),
    "a bool": (lambda y: (y.sum() > 4).item(), lambda x, number: x * number),
}


@pytest.mark.parametrize("case", FROM_DATA)
def test_what_works_with_numbers_made_of_data_is_not_captured(case: str) -> None:
    """What lies beside it is."""
    number, use = FROM_DATA[case]
    weight = torch.linspace(-0.4, 0.4, WIDTH * WIDTH).view(WIDTH, WIDTH)

    def much(x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x @ weight).sin() + x.cos()
        return x

    def step(x: Tensor, y: Tensor) -> Tensor:
        return much(use(much(x), number(y)))

    x, y = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH), torch.zeros(1)
    mark_unbacked(x, 0, shape_id="rows")
    with torch._dynamo.config.patch(capture_scalar_outputs=True), v41.collect() as reports:
        compiled = torch.compile(step, backend="v41", fullgraph=True)
        for total in range(1, 8):
            y.fill_(total)
            assert torch.equal(compiled(x, y), step(x, y))
    log = reports[0].captures
    assert len(reports) == 1 and log is not None and log.segment_replays > 0 and not log.errors


def test_capture_off_runs_uncaptured(recorder: list[CpuGraphs]) -> None:
    plain = Step()
    with v41.collect() as reports:
        run_both(torch.compile(plain, backend="v41", options={"capture": "off"}), plain, [(2, 1, 0)] * 3)
    assert reports[0].options["capture"] == ("off", "options") and reports[0].captures is None and not recorder


def test_buckets_of_the_options_go_before_the_models_own(recorder: list[CpuGraphs]) -> None:
    plain, options = Step(), {"buckets": {"rows": (3, 5)}}
    with v41.collect() as reports:
        run_both(torch.compile(plain, backend="v41", options=options), plain, [(3, 1, 0), (4, 1, 0)] * 3)
    log = reports[0].captures
    assert log is not None and log.captured == ["rows=3 blocks of ratio 1=1"]
    assert log.uncaptured == {"rows=4 is in no bucket": 3}


def test_buckets_of_a_size_that_is_none_are_refused() -> None:
    def compiled(fn: Callable[..., Any], size: str, x: Tensor, **more: Any) -> Any:
        torch.compiler.reset()
        mark_unbacked(x, 0, shape_id="tokens")
        return torch.compile(fn, backend="v41", options={"buckets": {size: (1, 2)}}, **more)(x)

    for size in ("tokens", "rows", "blocks of ratio 4", "x.1", "x"):  # a dimension may be a number in the first compile
        assert torch.equal(compiled(lambda x: x.sin(), size, torch.zeros(2, 3)), torch.zeros(2, 3))
    for size in ("nosuch", "token", "y.0", "blocks"):
        with pytest.raises(BackendCompilerFailed) as found:
            compiled(lambda x: x + 1, size, torch.zeros(2, 3))
        error = found.value.inner_exception
        assert isinstance(error, UnknownBuckets) and error.facts["size"] == size
        assert error.facts["known"].startswith("tokens, rows, ")

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2

    assert torch.equal(compiled(lambda x: broken(x + 1), "total", torch.zeros(2, 3)), torch.full((2, 3), 2.0))


@pytest.mark.parametrize("given", [{"rows": (2, 1)}, {"rows": ()}, {"rows": 4}, {1: (1, 2)}, [1, 2], {"rows": (1.0,)}])
def test_ladders_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(InvalidOptionValue, match="ascending integers"):
        parse({"buckets": given}, None)
    with pytest.raises(InvalidOptionValue, match="'auto' or 'off'"):
        parse({"capture": given}, None)


def live_parts(cache: Cache) -> list[Tensor]:
    """What a later step may read: no pad slot, and of the entries not the last, which is nobody's."""
    kept = [*cache.rings, *cache.tails.values()]
    return [t[:-1] for t in kept] + [t[:-1, :-1] for t in (*cache.entries.values(), *cache.index_keys.values())]


@pytest.mark.slow
def test_a_small_model_decodes_and_prefills_in_graphs(recorder: list[CpuGraphs]) -> None:
    config = small()
    model = V41ForCausalLM.random(config, seed=3).eval()
    compiled, caches = torch.compile(model, backend="v41", fullgraph=True), [Cache.zeros(config, 8, 96) for _ in "ab"]
    runs: tuple[Callable[..., Tensor], ...] = (compiled, model)
    buckets, ids = Buckets(prefill=(16, 32, 64)), [[(31 * slot + 7 * i) % 500 for i in range(96)] for slot in range(8)]
    kept: list[tuple[Tensor, ...]] = []

    def both(chunks: list[Chunk]) -> None:
        batch = build_batch(config, caches[0], chunks, buckets=buckets)
        kept.append(tuple(run(batch, cache)[: len(chunks)] for run, cache in zip(runs, caches, strict=True)))
        assert all(map(torch.equal, *zip(*kept, strict=True)))
        assert all(map(torch.equal, *(live_parts(cache) for cache in caches)))

    with v41.collect() as reports:
        warm_up(compiled, config, caches[0], buckets, rows=2, contexts=[8])
        done = [0] * 8
        for lengths in ([9, 1], [20, 1, 1], [5, 1], [1, 1, 12], [1], [1], [1], [1, 1, 1], [1, 1, 1], [1] * 8, [40, 9]):
            chunks = [Chunk(ids[s], done[s], s, done[s] + n) for s, n in enumerate(lengths)]
            done = [a + b for a, b in zip(done, [*lengths, *[0] * 8], strict=False)]
            both(chunks)
    log = reports[0].captures
    assert len(reports) == 1 and log is not None and not log.errors and not log.dropped
    assert log.replays >= 4 and log.segment_replays >= 2 and " rows=2 " in log.captured[0]


def test_results_that_share_memory_share_it_in_every_step(recorder: list[CpuGraphs]) -> None:
    """Whoever writes one of them finds that in the other, as in eager: uncaptured, captured and replayed."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return y, y[:, 1:].t(), x.cos()

    compiled = torch.compile(step, backend="v41", fullgraph=True)
    for _ in range(4):
        x = torch.randn(4, WIDTH)
        mark_unbacked(x, 0, shape_id="rows")
        for results in (compiled(x), step(x)):
            results[0].add_(1)
            assert torch.equal(results[1], x.sin()[:, 1:].t() + 1) and torch.equal(results[2], x.cos())
    assert [graph.replays for graph in recorder[0].graphs] == [3]


def test_copies_tell_what_shares_memory_by_where_it_lies() -> None:
    """A graph's results are tensors without ownership, each with a storage of its own."""
    y = torch.randn(3, 4)
    made = copies(borrowed((y, y[1:], y.sin(), 7)))
    made[0].zero_()
    assert made[1].eq(0).all() and made[2].ne(0).all() and y.ne(0).all() and made[3] == 7
