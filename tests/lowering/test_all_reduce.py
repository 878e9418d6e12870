"""Sums over ranks, interpreted in processes that share memory: the bits of the boundary alone on the sum, on all ranks,
whatever the way and however ranks drift apart; each planted flaw of the protocol is noticed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.lowering.ranks import Ranks, shifted
from tests.lowering.rowwise.boundaries import layer_norm, rms_norm
from tests.strategies.tracing import trace
from v41.errors import NoWorkspace, PeerStalled
from v41.lowering.rowwise import Schedule, Unsupported, pass_over
from v41.lowering.templates.all_reduce import SummingKernel, generate, group_of
from v41.lowering.templates.all_reduce.launch import Units, Way
from v41.model_def import mhc
from v41.passes.same_values import random_inputs
from v41.regions import behind_sum

pytestmark = pytest.mark.usefixtures("fake_group")
COUNT, WIDTH = 3, 128  # of ranks: no power of two, and enough for their order to show
functional = torch.ops._c10d_functional
WAYS = {  # heights, shares and launches of one shot; units of rows and of columns in two
    "one shot": Way(Schedule(1, 1, 2, 128)),
    "one shot, tall, two launches": Way(Schedule(4, 1, 2, 64, shares=2)),
    "one shot, wide programs": Way(Schedule(2, 2, 2, 64)),
    "two shots": Way(Schedule(4, 1, 4, 64, shares=3), Units(1, 2, 64, 16)),
    "two shots, blocks": Way(Schedule(4, 2, 4, 128), Units(2, 1, 32, 16)),
}
QUIET: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
    "max_examples": 4,
}


def summed(y: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(y, "sum", "0"))


def residual(y: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = summed(y)
    return x + y, rms_norm(x + y, w), y


def seam(y: Tensor, X: Tensor, C: Tensor, B: Tensor, A: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    X = mhc.expand(X, summed(y), C, B)
    return X, rms_norm(mhc.collapse(X, A), w)


def norm_alone(y: Tensor, w: Tensor) -> Tensor:  # a later phase needs the sum, which only the first can read
    return layer_norm(summed(y), w)


def two_tiles(y: Tensor, w: Tensor) -> Tensor:
    y = summed(y).float()
    return (y.sum(1) * w).bfloat16()


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


BODIES: dict[str, tuple[Callable[..., Any], Callable[[int], list[Tensor]], list[Tensor]]] = {
    "residual": (residual, lambda T: [bf16(T, WIDTH), bf16(T, WIDTH)], [torch.randn(WIDTH)]),
    "seam": (seam, lambda T: [bf16(T, WIDTH), bf16(T, 2, WIDTH), torch.rand(T, 2), torch.rand(T, 2, 2),
                              torch.rand(T, 2)], [bf16(WIDTH)]),
    "norm alone": (norm_alone, lambda T: [bf16(T, WIDTH)], [torch.randn(WIDTH)]),
    "two tiles": (two_tiles, lambda T: [bf16(T, 2, WIDTH)], [torch.randn(WIDTH)]),
    "fp32": (residual, lambda T: [torch.randn(T, WIDTH), torch.randn(T, WIDTH)], [torch.randn(WIDTH)]),
    "odd width": (residual, lambda T: [bf16(T, 100), bf16(T, 100)], [torch.randn(100)]),
}  # fmt: skip


@cache
def made(name: str) -> tuple[GraphModule, SummingKernel]:
    fn, rows, weights = BODIES[name]
    body = trace(fn, *rows(7), static=weights, backed=True)
    kernel = generate(body, COUNT)
    assert isinstance(kernel, SummingKernel), kernel
    return body, kernel


def inputs_of(name: str, rows: int) -> list[list[Any]]:
    """For each rank: parts differ, all else is the same. The first and last nearly cancel, so that order shows."""
    body, kernel = made(name)
    torch.manual_seed(rows)
    shared = random_inputs(body, rows)
    like = shared[kernel.part]
    parts = [torch.randn(like.shape).to(like.dtype) for _ in range(COUNT)]
    parts[-1] = -(parts[0] * 2**20)
    parts[0] = parts[0] * 2**20
    return [[part if i == kernel.part else each for i, each in enumerate(shared)] for part in parts]


def added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def expected(ranks: Ranks, name: str, inputs: Sequence[Sequence[Any]], calls: int) -> list[list[Tensor]]:
    """What the boundary alone makes of the sum, a call each."""
    body, kernel = made(name)
    alone = pass_over(behind_sum(body), "alone")
    found = []
    for call in range(calls):
        given = [shifted(each, call) for each in inputs]
        merged = [added([each[i] for each in given]) if i == kernel.part else given[0][i] for i in range(len(given[0]))]
        (results,) = ranks.run(alone, [merged] * COUNT, Schedule(1, 1, 2, 64), present=[0])
        found.append(results[0])
    return found


def check_calls(results: Sequence[Any], wanted: Sequence[Sequence[Tensor]]) -> None:
    """Every rank has the bits that are wanted, in every call."""
    for rank, calls in enumerate(results):
        assert not isinstance(calls, Exception), f"rank {rank}: {calls}"
        for call, (ours, theirs) in enumerate(zip(calls, wanted, strict=True)):
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(a, b), f"rank {rank}, call {call}, output {i}"


def test_atomics_of_the_interpreter_are_the_processors(ranks: Ranks) -> None:
    ranks.fresh()
    assert ranks.add(700) == COUNT * 700


QUICK_PAIRS = (("residual", "one shot, tall, two launches"), ("seam", "two shots, blocks"))
PAIRS = [pytest.param(name, way, marks=[pytest.mark.slow] * ((name, way) not in QUICK_PAIRS), id=f"{name}-{way}")
         for name in ("residual", "seam") for way in WAYS]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_the_bits_of_the_boundary_alone(ranks: Ranks, name: str, way: str) -> None:
    ranks.fresh()
    inputs = inputs_of(name, 5)
    check_calls(ranks.run(made(name)[1], inputs, WAYS[way], calls=2), expected(ranks, name, inputs, 2))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one shot, wide programs", "two shots"])
@pytest.mark.parametrize("name", ["norm alone", "two tiles", "fp32", "odd width"])
def test_other_bodies(ranks: Ranks, name: str, way: str) -> None:
    ranks.fresh()
    inputs = inputs_of(name, 3)
    check_calls(ranks.run(made(name)[1], inputs, WAYS[way], calls=2), expected(ranks, name, inputs, 2))


def test_the_reduced_value_is_the_sum_in_order_of_ranks(ranks: Ranks) -> None:
    ranks.fresh()
    inputs = inputs_of("residual", 4)
    _, kernel = made("residual")
    wanted = added([each[kernel.part] for each in inputs])
    other = added([each[kernel.part] for each in reversed(inputs)])
    assert not torch.equal(wanted, other), "the order does not show"
    for results in ranks.run(kernel, inputs):
        assert torch.equal(results[0][2], wanted)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(sorted(WAYS)), st.integers(1, 9)), min_size=2, max_size=5))
@settings(**QUIET)
def test_calls_of_all_kinds_one_after_the_other(ranks: Ranks, calls: list[tuple[str, int]]) -> None:
    ranks.fresh()
    _, kernel = made("residual")
    for way, rows in calls:
        inputs = inputs_of("residual", rows)
        results = ranks.run(kernel, inputs, WAYS[way], sleeps=[0.0, 0.002, 0.0])
        wanted = added([each[kernel.part] for each in inputs])
        for each in results:
            assert not isinstance(each, Exception), each
            assert torch.equal(each[0][2], wanted), (way, rows)
            assert all(torch.equal(a, b) for a, b in zip(each[0], results[0][0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("calls", [12, 300])
@pytest.mark.parametrize("way", ["one shot", "two shots, blocks"])
def test_many_calls_while_ranks_drift_apart(ranks: Ranks, way: str, calls: int) -> None:
    ranks.fresh()
    inputs = inputs_of("residual", 1)
    _, kernel = made("residual")
    for naps in ([0.0, 0.003, 0.0], [0.002, 0.0, 0.002]):
        results = ranks.run(kernel, inputs, WAYS[way], calls=calls, sleeps=naps)
        for each in results:
            assert not isinstance(each, Exception), each
            for call in range(calls):
                wanted = added([shifted(given, call)[kernel.part] for given in inputs])
                assert torch.equal(each[call][2], wanted), call


FLAWS = {  # what is planted: way, pattern and replacement
    "words are not waited for": ("one shot", r"missing = tl\.max\(tl\.max", "missing = 0 * tl.max(tl.max"),
    "flags are not waited for": ("two shots", r"missing = tl\.max\(tl\.where", "missing = 0 * tl.max(tl.where"),
    "one half for all calls": ("one shot, wide programs", r"\(epoch & 1\) \* slots", "0 * slots"),
    "the epoch of words stays": ("one shot", r"tl\.store\(epochs \+ slot, epoch\)", "pass"),
    "the epoch of flags stays": ("two shots", r"tl\.store\(epochs \+ unit, epoch\)", "pass"),
    "the epoch is not in the words": ("one shot", r"return \(word >> 16\) == .*", "return word != 0"),
    "ranks are added in another order": ("one shot", r"element\(w1(.*\n.*)element\(w2", r"element(w2\1element(w1"),
    "owners add in another order": ("two shots", r"1 \* CAP(.*\n.*)2 \* CAP", r"2 * CAP\g<1>1 * CAP"),
    "the flag comes before the data": ("two shots", r"(    for start in range\(0, SPAN.*\n(?:.*\n)*?)(    signal.*\n)",
                                       r"\2\1"),
}  # fmt: skip
QUICK = ("one half for all calls",)


HELD = {  # what makes a flaw show: the middle rank stops there
    "one half for all calls": (1, "put", 0.3),
    "the flag comes before the data": (1, "atomic", 0.6),
}


@pytest.mark.parametrize("flaw", [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in FLAWS])
def test_a_planted_flaw_is_noticed(ranks: Ranks, flaw: str) -> None:
    way, pattern, new = FLAWS[flaw]
    _, kernel = made("residual")
    text = re.sub(pattern, new, kernel.source)
    assert text != kernel.source, "nothing was planted"
    rows, calls, naps = (1, 2, [0.0] * COUNT) if flaw in HELD else (2, 15, [0.0, 0.03, 0.01])
    inputs = inputs_of("residual", rows)
    planted = replace(kernel, source=text, _module=None)
    ranks.fresh(patience=4.0)
    results = ranks.run(planted, inputs, WAYS[way], calls, sleeps=naps, holds=HELD.get(flaw))
    noticed = any(isinstance(each, PeerStalled) for each in results)
    for each in results:
        assert not isinstance(each, Exception) or isinstance(each, PeerStalled), each
        for call in range(0 if isinstance(each, Exception) else calls):
            wanted = added([shifted(given, call)[kernel.part] for given in inputs])
            noticed |= not torch.equal(each[call][2], wanted)
    assert noticed


@pytest.mark.slow
@pytest.mark.parametrize("flaw", HELD)
def test_what_shows_a_flaw_does_no_harm_without_it(ranks: Ranks, flaw: str) -> None:
    _, kernel = made("residual")
    inputs = inputs_of("residual", 1)
    ranks.fresh()
    for each in ranks.run(kernel, inputs, WAYS[FLAWS[flaw][0]], 2, holds=HELD[flaw]):
        for call in range(2):
            assert torch.equal(each[call][2], added([shifted(given, call)[kernel.part] for given in inputs]))


@pytest.mark.parametrize("way", ["one shot", pytest.param("two shots", marks=pytest.mark.slow)])
def test_a_rank_that_stays_away_is_an_error_with_its_name(ranks: Ranks, way: str) -> None:
    ranks.fresh()
    inputs = inputs_of("residual", 2)
    _, kernel = made("residual")
    assert not any(isinstance(each, Exception) for each in ranks.run(kernel, inputs, WAYS[way]))
    ranks.hurry(0.5)
    for rank, error in zip([0, 1], ranks.run(kernel, inputs, WAYS[way], present=[0, 1]), strict=True):
        assert isinstance(error, PeerStalled), error
        assert error.where == kernel.name
        assert (error.facts["rank"], error.facts["peer"], error.facts["epoch"]) == (rank, 2, 2)


def test_a_kernel_without_shared_memory_says_so() -> None:
    _, kernel = made("residual")
    with pytest.raises(NoWorkspace):
        replace(kernel, workspace=None).prepare(inputs_of("residual", 2)[0])


REFUSED: dict[str, Callable[..., Any]] = {
    "reduces by max": lambda y, w: functional.wait_tensor(functional.all_reduce(y, "max", "0")) * w,
    "is read as one rank's part too": lambda y, w: summed(y) * w + y,
    "not one all_reduce": lambda y, w: summed(summed(y)) * w,
    "does not know": lambda y, w: summed(y).cumsum(-1) * w,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_with_a_reason(reason: str) -> None:
    body = trace(REFUSED[reason], bf16(7, WIDTH), static=[torch.randn(WIDTH)], backed=True)
    assert group_of(body) == "0"
    refusal = generate(body, COUNT)
    assert isinstance(refusal, Unsupported) and reason in refusal.reason, refusal


def test_columns_that_do_not_lie_side_by_side_are_refused() -> None:
    """What is sent, and where it is read, lies in one piece."""
    body = trace(lambda x, y: x.neg() + summed(y).mT, bf16(7, 4, WIDTH), bf16(7, WIDTH, 4), backed=True)
    refusal = generate(body, COUNT)
    assert isinstance(refusal, Unsupported) and "do not lie side by side" in refusal.reason, refusal


def test_the_step_of_an_axis_of_one_is_no_step_between_columns(ranks: Ranks) -> None:
    body = trace(lambda x, y: x.neg() + summed(y).squeeze(2), bf16(7, WIDTH), tall(7), backed=True)
    kernel = generate(body, COUNT)
    assert isinstance(kernel, SummingKernel) and kernel.part is not None, kernel
    assert kernel.inputs[kernel.part].steps == (WIDTH, 1, WIDTH)  # type: ignore[union-attr]
    x, parts = bf16(2, WIDTH), [tall(2).normal_() for _ in range(COUNT)]
    wanted = x.neg() + added(parts).squeeze(2)
    given = [[None if what is None else part if i == kernel.part else x for i, what in enumerate(kernel.inputs)]
             for part in parts]  # fmt: skip
    ranks.fresh()
    check_calls(ranks.run(kernel, given), [[wanted]])


def tall(rows: int) -> Tensor:
    return torch.empty_strided((rows, WIDTH, 1), (WIDTH, 1, WIDTH), dtype=torch.bfloat16)


def test_a_body_without_collectives_talks_to_no_group() -> None:
    assert group_of(trace(lambda y: y * 2, bf16(7, WIDTH), backed=True)) is None
