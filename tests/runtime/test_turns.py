"""A compiled function takes one call at a time: other threads wait, and a call within a call runs uncaptured."""

from __future__ import annotations

from threading import Thread
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu_graphs import CpuGraph, CpuGraphs
from tests.runtime.test_replay import ARTIFACTS, PLAN, SLOTS, WIDTH, Pair, W
from v41.plan import Plan
from v41.report import Captures
from v41.runtime.replay import Replayer

BLOCK = torch.arange(1)


@torch.no_grad()
def test_a_call_within_a_call_of_itself_runs_uncaptured_and_leaves_the_outer_one_alone() -> None:
    within: list[Any] = []

    def calls(s: Tensor, y: Tensor) -> tuple[Tensor]:
        if within:
            within.pop()(torch.full((2, WIDTH), 9.0))
        return (s.sin() + y,)

    pair, inner = Pair(artifacts={"add": calls}), list[Any]()
    for _ in range(4):
        cache = torch.ones(SLOTS + 1, WIDTH)
        within.append(lambda x, cache=cache: inner.append(pair.captured([2, x, torch.arange(2), W, cache, 1, BLOCK])))
        pair.step(3, 1)  # in no bucket
        pair.step(2, 1)
    assert pair.log.uncaptured["it was called within a call of itself"] == len(inner) == 4
    assert pair.log.replays == 3 and not pair.log.dropped and all(torch.equal(each[0], inner[0][0]) for each in inner)


@torch.no_grad()
def test_a_call_within_a_replay_leaves_its_inputs_alone() -> None:
    pair, graphs = Pair(), list[Any]()
    for _ in range(2):
        pair.step(2, 1)
    (graph,) = pair.graphs.graphs
    replay = graph.replay

    def first_another() -> None:
        graph.replay = replay  # type: ignore[method-assign]
        cache = torch.ones(SLOTS + 1, WIDTH)
        graphs.append(pair.captured([2, torch.full((2, WIDTH), 9.0), torch.arange(2), W, cache, 1, BLOCK]))
        replay()

    graph.replay = first_another  # type: ignore[method-assign]
    pair.step(2, 1)
    assert len(graphs) == 1 and pair.log.replays == 2 and not pair.log.dropped


@torch.no_grad()
def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = CpuGraph.replay

    def slowly(graph: CpuGraph) -> None:
        sleep(2e-4)  # between the copy of the inputs and the run, others go on
        replay(graph)

    monkeypatch.setattr(CpuGraph, "replay", slowly)
    plan = Plan(("u0", "x", "w"), ("h",), {n: PLAN.values[n] for n in ("u0", "x", "w", "h")}, PLAN.pieces[:1],
                {"u0": "rows"}, PLAN.buckets, PLAN.whole)  # fmt: skip
    log = Captures()
    run, wrong = Replayer(plan, ARTIFACTS, CpuGraphs(), log), list[int]()

    def steps(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for rows in (1, 2, 4) * 40:
            x = torch.randn(rows, WIDTH, generator=draw)
            if not torch.equal(run([rows, x.clone(), W])[0], x @ W):
                wrong.append(seed)

    threads = [Thread(target=torch.no_grad()(steps), args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not log.errors and not any(thread.is_alive() for thread in threads)
    assert log.replays == 4 * 120 - 3 and len(log.captured) == log.warm_ups == 3
