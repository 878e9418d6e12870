"""The criterion holds for noise within eager's own, names what is beyond it, and fails for a damaged model."""

from __future__ import annotations

import math
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from v41.model_def import attention
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.compare import JUDGED, KL_LIMIT, MOVE_LIMIT, agree, join, largest
from v41.tools.generate_view import noise
from v41.tools.last_bits import reference
from v41.tools.recording import Recording, replay


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def test_equal_runs_are_bit_equal() -> None:
    eager = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    found = agree(eager, eager.clone(), eager.double()[None])
    assert (found.holds, found.bit_equal, found.same_argmax, found.excused, found.failed) == (True, 7, 7, 0, 0)
    assert (found.max_kl, found.max_deviation, found.moved) == (0, 0, 0)


def test_eager_writes_the_same_noise_where_all_rows_have_its_bits() -> None:
    eager = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    same, other = (agree(eager, rows, eager.double()[None]) for rows in (eager, eager.nextafter(eager + 1)))
    assert "eager" in noise([same, same])
    assert "eager" not in noise([same, other]) and "eager" not in noise([])


def test_kl_is_the_divergence_from_eager() -> None:
    p, q = [0.7, 0.2, 0.1], [0.6, 0.25, 0.15]
    found = agree(logits(p).log(), logits(q).log() + 3, logits(p).log()[None])  # a constant shift is no difference
    assert found.max_kl == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), abs=1e-6)
    assert found.rows[0].gap == pytest.approx(math.log(0.7 / 0.2), abs=1e-6)


@pytest.mark.parametrize(("deviation", "excused"), [(0.004, False), (0.006, True)])
def test_another_argmax_needs_a_gap_below_twice_the_deviation(deviation: float, excused: bool) -> None:
    eager, compiled = logits([1.0, 1.01, 0.0]), logits([1.01, 1.0, 0.0])
    moved = eager + logits([0.0, 0.0, deviation])
    found = agree(eager, compiled, torch.stack([eager, moved]))
    assert (found.same_argmax, found.excused, found.holds) == (0, int(excused), excused)


def test_a_deviation_excuses_its_own_row_only() -> None:
    eager, compiled = logits([1.0, 1.01], [1.0, 1.01]), logits([1.01, 1.0], [1.01, 1.0])
    found = agree(eager, compiled, (eager + logits([0.5, 0.5], [0, 0]))[None])
    assert [row.holds for row in found.rows] == [True, False]
    assert found.failed == 1 and not found.holds


def test_the_kl_limit_counts_where_the_argmax_agrees() -> None:
    eager, compiled = logits([2.0, 0.0, 0.0]), logits([2.0, 1.0, 0.0])
    found = agree(eager, compiled, eager[None])
    assert found.same_argmax == 1 and found.max_kl > KL_LIMIT and not found.holds


@pytest.mark.parametrize("damaged", ["compiled", "eager"])
def test_nan_fails(damaged: str) -> None:
    runs = {name: logits([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) for name in ("eager", "compiled", "exact")}
    runs[damaged][1, 1] = math.nan
    found = agree(runs["eager"], runs["compiled"], runs["exact"][None])
    assert [row.holds for row in found.rows] == [True, False] and math.isnan(found.max_kl)


def test_nothing_compared_is_no_agreement() -> None:
    assert not agree(*torch.zeros(2, 0, 5), torch.zeros(1, 0, 5)).holds
    assert not join([]).holds and largest([]) == 0


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e-2))
def test_the_exact_run_itself_never_fails_by_its_argmax(seed: int, noise: float) -> None:
    """Whatever noise eager has, a run without any is excused where they differ: what the factor of two is for."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(20, 8, generator=generator, dtype=torch.float64) * noise
    eager = exact + noise * (torch.rand(20, 8, generator=generator, dtype=torch.float64) * 2 - 1)
    found = agree(eager, exact, exact[None])
    assert found.same_argmax + found.excused == 20


@torch.no_grad()
@pytest.mark.parametrize("damage", [0, 0.5])
def test_a_damaged_model_fails_and_a_sound_one_holds(damage: float) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 64))
    exact, compiled = deepcopy(model).double(), deepcopy(model)
    compiled[1].weight.mul_(1 + damage)
    eager, ours, truth = (run(torch.arange(64)) for run in (model, compiled, exact))
    found = agree(eager, ours, truth[None])
    assert found.holds == (damage == 0)
    assert found.max_deviation > 0


def test_a_run_whose_every_row_moves_is_not_excused_by_single_rows() -> None:
    """No row is beyond its limits, and the median shows the fault; of few rows it shows nothing."""
    eager = torch.randn(2 * JUDGED, 50, generator=torch.Generator().manual_seed(0))
    last_bits = torch.stack([eager + 1e-3, eager - 2e-3])
    near, far = (agree(eager, eager + moved, last_bits) for moved in (0.0079, 0.0081))
    assert near.moved == pytest.approx(3.95, rel=1e-2) and near.holds
    assert far.failed == 0 and not far.holds
    assert agree(eager[:9], eager[:9] + 0.0081, last_bits[:, :9]).holds
    assert math.isinf(agree(eager, eager + 1e-3, eager[None]).moved)


@pytest.fixture(scope="module")
def tiny() -> tuple[V41ForCausalLM, Recording, Tensor]:
    """A random model, what it wrote, and the same with other last bits."""
    model = V41ForCausalLM.random(V41Config.preset("tiny"), 0)
    prompts, settings = [list(range(40)), [7, 8, 9]], {"tokens": 20, "chunk": 24, "device": "cpu"}
    with torch.no_grad():
        return model, *reference(model, prompts, 0, settings)


@torch.no_grad()
def test_a_random_model_is_a_calm_judge(tiny: tuple[V41ForCausalLM, Recording, Tensor]) -> None:
    """Last bits alone break no row, whichever run of them is judged by the others: what does is more than last bits."""
    _, made, last_bits = tiny
    for place, one in enumerate(last_bits):
        others = torch.cat([last_bits[:place], last_bits[place + 1 :]])
        found = agree(made.logits, one, others)
        assert found.holds and len(found.rows) > JUDGED
        assert found.max_kl < KL_LIMIT / 2  # with a gain of 1 above it


@torch.no_grad()
def test_a_calm_judge_sees_a_missing_rotation(tiny: tuple[V41ForCausalLM, Recording, Tensor]) -> None:
    """One of the smallest faults, attention's result not rotated back, moves every row."""
    model, made, last_bits = tiny
    rotate = attention.rotate

    def forward_only(x: Tensor, by: attention.Turn, inverse: bool = False) -> Tensor:
        return x if inverse else rotate(x, by)

    with patch.object(attention, "rotate", forward_only):
        faulty = replay(model, model.config, made, "cpu")
    found = agree(made.logits, faulty, last_bits)
    assert found.moved > MOVE_LIMIT and not found.holds
