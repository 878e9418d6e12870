"""Selection: exactly the model's picks, however scores lie, whatever tiles a row is cut into."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from tests.lowering.templates.launched import interpret
from tests.triton_interpreter import Interpreter
from v41.lowering.templates.topk import MOST, TopK, levels_of
from v41.lowering.templates.topk.launch import LARGEST, padded
from v41.model_def.indexer import ascending_picks

INF, NAN = float("inf"), float("nan")
NUMBERS = (0.0, -0.0, 1.0, 1.0 + 2.0**-23, -1.0, 1e-45, -1e-45, 3e38, -3e38, INF, -INF, NAN)


def picks_of(interpreter: Interpreter, scores: Tensor, k: int, tile: int | None = None) -> Tensor:
    kernel = TopK.of(k)
    steps, picks = kernel.steps(scores, tile)
    picks.fill_(77)
    interpret(interpreter, kernel, steps)
    return picks


def wanted(scores: Tensor, k: int) -> Tensor:
    """By the model, to which fewer columns than k are as many that nobody picks."""
    return ascending_picks(pad(scores, (0, k), value=-INF), k)


def check_picks(interpreter: Interpreter, scores: Tensor, k: int, *tiles: int | None) -> None:
    for tile in tiles or (None,):
        assert torch.equal(picks_of(interpreter, scores, k, tile), wanted(scores, k))


@st.composite
def scores(draw: st.DrawFn) -> Tensor:
    """Rows of few different numbers, of numbers close to each other, or of any."""
    rows, columns, seed = draw(st.integers(1, 3)), draw(st.integers(1, 90)), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    match draw(st.sampled_from(("few", "close", "any"))):
        case "few":
            some = torch.tensor(draw(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4)))
            return some[torch.randint(0, len(some), (rows, columns), generator=generator)]
        case "close":
            return 1 + torch.randint(0, 4, (rows, columns), generator=generator) * 2.0**-23
    return torch.randn(rows, columns, generator=generator)


@given(scores(), st.integers(1, 20), st.sampled_from((None, 16, 64)))
def test_picks_are_the_models(interpreter: Interpreter, scores: Tensor, k: int, tile: int | None) -> None:
    check_picks(interpreter, scores, k, tile)


@pytest.mark.parametrize("value", [0.0, -0.0, -3.0, INF, -INF, NAN])
def test_of_equal_scores_the_first_are_picked_in_one_round_and_in_more(interpreter: Interpreter, value: float) -> None:
    check_picks(interpreter, torch.full((2, 150), value), 7, None, 32)


def test_a_tie_at_the_border_goes_to_the_lower_column_across_tiles(interpreter: Interpreter) -> None:
    scores = torch.zeros(1, 200)
    scores[0, [3, 150, 199]] = 1.0
    assert picks_of(interpreter, scores, 5, 32).tolist() == [[0, 1, 3, 150, 199]]


def test_nothing_is_dropped_where_more_scores_lie_close_than_are_picked(interpreter: Interpreter) -> None:
    """2,000 of them within a bf16 ulp, half of them equal: no coarse bin may be a buffer."""
    generator = torch.Generator().manual_seed(0)
    scores = 1 + torch.randint(0, 1000, (1, 2000), generator=generator) * 2.0**-23
    check_picks(interpreter, scores, 512, 1024, 2048)


def test_fewer_than_k_are_padded_and_no_sentinel_is_a_column(interpreter: Interpreter) -> None:
    scores = torch.full((3, 40), -INF)
    scores[0, [39, 2]] = -5.0
    scores[1, ::2] = NAN
    scores[1, 1] = -3e38
    found = picks_of(interpreter, scores, 6, 16)
    assert found.tolist() == [[2, 39, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1], [-1] * 6]


def test_a_tile_that_is_no_longer_than_what_is_picked_leaves_out_what_is_never_picked(interpreter: Interpreter) -> None:
    """All 16 columns are at -inf or above, exactly k of them: they are not for that the k best."""
    scores = torch.full((2, 16), -INF)
    scores[0, 3] = -1.0
    scores[1] = NAN
    assert picks_of(interpreter, scores, 16).tolist() == [[3] + [-1] * 15, [-1] * 16]


def test_where_k_lie_above_a_cut_or_ties_do_at_it_the_same_are_picked(interpreter: Interpreter) -> None:
    """Both ways to place picks, in lines longer than one: all different, and each number twice."""
    different = torch.randperm(5000, generator=torch.Generator().manual_seed(1)).float()[None]
    check_picks(interpreter, torch.cat((different, (different / 2).floor())), 301, None, 1024)


def test_picks_of_rows_of_three_levels_are_the_models(interpreter: Interpreter) -> None:
    """Close scores, equal ones, and picks that lie side by side; NaN and -inf fill whole runs."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(4, 5000, generator=generator)
    scores[1] = scores[1].round(decimals=1)
    scores[2, 4990:] += 9.0
    scores[3, 64:4500] = torch.where(torch.rand(4436, generator=generator) < 0.5, NAN, -INF)
    scores[3, :64] = -INF
    assert levels_of(5000, 4, 16).levels == 3
    check_picks(interpreter, scores, 4, 16)
    check_picks(interpreter, scores, 12, 16)


def test_a_row_has_its_picks_in_any_batch(interpreter: Interpreter) -> None:
    scores = torch.randn(4, 100, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    scores[1] = NAN
    whole = picks_of(interpreter, scores, 10)
    assert torch.equal(whole[3:], picks_of(interpreter, scores[3:], 10, 32))


def test_no_rows_are_no_launch_and_no_columns_are_no_picks(interpreter: Interpreter) -> None:
    assert TopK.of(4).steps(torch.empty(0, 9))[0] == []
    assert picks_of(interpreter, torch.empty(2, 0), 3).tolist() == [[-1] * 3] * 2


@given(st.integers(0, 1 << 20), st.integers(1, MOST), st.sampled_from((None, 16, 4096)))
def test_the_highest_level_fits_a_tile_and_the_runs_below_do_too(columns: int, k: int, tile: int | None) -> None:
    found = levels_of(columns, k, tile)
    count = columns
    for _ in range(found.levels):
        count = -(-count // found.group)
    assert count <= found.tile <= max(LARGEST, 2 * padded(k)) and found.tile.bit_count() == 1
    assert found.levels == 0 or count > k // found.group, "no level is made that leaves nothing to choose"
    assert padded(k) * found.group <= max(LARGEST, 2 * padded(k)) and found.group.bit_count() == 1
    assert not found.fold or (found.levels == 1 and columns <= LARGEST)
    room = padded(k)
    assert found.warps(room).bit_count() == 1 and found.tile % found.wide(room) == 0


def test_more_picks_than_a_tile_holds_are_refused() -> None:
    for k in (0, MOST + 1):
        with pytest.raises(ValueError, match=r"selects .* of each row: from 1 to 4096 fit a tile"):
            TopK.of(k)


def test_a_kernel_travels() -> None:
    kernel = TopK.of(3)
    assert pickle.loads(pickle.dumps(kernel)).source == kernel.source
