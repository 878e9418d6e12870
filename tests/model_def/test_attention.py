"""The attention core against loops in fp64, and where each row finds its window keys against plain bookkeeping."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from v41.model_def.attention import Attention, attend
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.step import plan_step

TINY = V41Config.preset("tiny")


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, H, K = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    D = draw(st.sampled_from((4, 16)))
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    q, keys = (torch.randn(*shape).mul(draw(st.sampled_from((1, 4)))).bfloat16() for shape in ((T, H, D), (T, K, D)))
    visible = torch.rand(T, K) < draw(st.sampled_from((0.0, 0.5, 1.0)))
    return q, keys, visible, torch.randn(H) * draw(st.sampled_from((1, 30)))


def one_head(q: Tensor, keys: Tensor, visible: list[bool], sink: float) -> Tensor:
    """fp64, P rounded to bf16 before the values and not in the denominator."""
    scores = [float(q.double() @ k.double()) / math.sqrt(len(q)) for k in keys]
    seen = [i for i, there in enumerate(visible) if there]
    if not seen:
        return torch.zeros_like(q, dtype=torch.float64)
    top = max(scores[i] for i in seen)
    p = {i: math.exp(scores[i] - top) for i in seen}
    rounded = {i: float(torch.tensor(p[i]).bfloat16()) for i in seen}
    total = torch.stack([rounded[i] * keys[i].double() for i in seen]).sum(0)
    return total / (sum(p.values()) + math.exp(min(sink - top, 700)))


@given(attentions())
def test_attend(case: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, keys, visible, sink = case
    ours = attend(q, keys, visible, sink)
    assert ours.shape == q.shape and ours.dtype == q.dtype
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            theirs = one_head(q[t, h], keys[t], visible[t].tolist(), float(sink[h]))
            size = 2**-8 * theirs.abs() + 2**-8 * float(keys[t].abs().max())  # one flip of a rounded P
            assert ((ours[t, h].double() - theirs).abs() <= size).all()


@given(attentions())
def test_what_a_row_does_not_see_may_hold_anything(case: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, keys, visible, sink = case
    poisoned = torch.where(visible.unsqueeze(-1), keys, math.nan)
    assert torch.equal(attend(q, poisoned, visible, sink), attend(q, keys, visible, sink))


def test_the_sink_takes_weight_and_adds_no_value() -> None:
    q, keys, visible = torch.zeros(1, 1, 4).bfloat16(), torch.ones(1, 3, 4).bfloat16(), torch.ones(1, 3).bool()
    assert attend(q, keys, visible, torch.tensor([-math.inf])).eq(1).all()
    assert attend(q, keys, visible, torch.tensor([math.log(3.0)])).eq(0.5).all()  # unscaled beside scaled scores
    assert attend(q, keys, visible, torch.tensor([1e4])).eq(0).all()
    assert attend(q, keys, ~visible, torch.tensor([0.0])).eq(0).all()


def test_rounding_p_matters() -> None:
    """Two keys, the second with a probability that is no bf16 number: the result is the rounded one's."""
    differ = 0
    for step in range(1, 40):
        q, away = torch.tensor([[[1.0, 0, 0, 0]]]).bfloat16(), -step / 16
        keys = torch.tensor([[[0.0, 128, 0, 0], [away, 0, 128, 0]]]).bfloat16()
        ours = float(attend(q, keys, torch.ones(1, 2).bool(), torch.tensor([-math.inf]))[0, 0, 2])
        p = math.exp(away / 2)
        rounded = float(torch.tensor(p).bfloat16())
        assert ours == float(torch.tensor(128 * rounded / (1 + p)).bfloat16())
        differ += ours != float(torch.tensor(128 * p / (1 + p)).bfloat16())
    assert differ > 5


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 3))
def test_each_row_finds_its_window_keys(cuts: list[int], pads: int) -> None:
    """A model of the cache that keeps positions instead of keys, over chunks of any lengths."""
    ends = sorted({*cuts, 40})
    cache, window, ring = Cache.zeros(TINY, 2, 40), TINY.sliding_window, [-1] * TINY.sliding_window
    for start, stop in zip([0, *ends], ends, strict=False):
        buckets = Buckets(decode=(1 + pads,), prefill=(max(stop - start + pads, 1),))
        batch = build_batch(TINY, cache, [Chunk([5] * 40, start, 1, stop)], buckets=buckets)
        found = plan_step(batch, cache, window, torch.ones(1), torch.ones(1)).window
        for t, p in enumerate(range(start, stop)):
            keys = [(start + row if inside else ring[place]) for row, inside, place in zip(
                found.rows[t].tolist(), found.in_step[t].tolist(), found.places[t].tolist(), strict=True)]
            seen = [key for key, there in zip(keys, found.visible[t].tolist(), strict=True) if there]
            assert seen == list(range(max(0, p - window + 1), p + 1))
        assert not found.visible[stop - start :].any()
        for p in range(start, stop):
            ring[p % window] = p


@pytest.mark.parametrize(("switch", "late"), [("off", []), ("after_source", [4, 5]), ("from_source", [3, 4, 5])])
def test_which_layers_a_replay_truncates(switch: str, late: list[int]) -> None:
    config = TINY.replace(swa_bounded_replay=switch)
    assert [role.layer for role in config.roles if Attention(config, role).late] == late
