"""The indexer against loops: scores in fp64, picks and candidate blocks by sorting (score, lower entry first)."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from v41.model_def.indexer import HEADS_AT_ONCE, ascending_picks, candidate_mask, entries_of, index_scores

few_values = st.sampled_from((-math.inf, -1.0, 0.0, -0.0, 0.5, 2.0))  # so ties are the rule


@st.composite
def score_rows(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    """Rows of scores, and how many entries a block has."""
    size, blocks, rows = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(0, 3))
    row = st.lists(few_values, min_size=size * blocks, max_size=size * blocks)
    return draw(st.lists(row, min_size=rows, max_size=rows)), size


def best_first(scores: list[float], k: int) -> list[int]:
    """The k best that are there at all."""
    order = sorted(range(len(scores)), key=lambda g: (-scores[g], g))
    return [g for g in order[:k] if scores[g] > -math.inf]


def as_rows(rows: list[list[float]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).view(len(rows), width)


@given(score_rows(), st.data())
def test_picks_ascend_and_ties_go_to_the_lower_entry(drawn: tuple[list[list[float]], int], data: st.DataObject) -> None:
    rows, _ = drawn
    width = len(rows[0]) if rows else 4
    k = data.draw(st.integers(1, width))
    expected = [(best := sorted(best_first(row, k))) + [-1] * (k - len(best)) for row in rows]
    assert ascending_picks(as_rows(rows, width), k).tolist() == expected


def test_a_row_of_nan_picks_nothing() -> None:
    assert ascending_picks(torch.tensor([[math.nan, 1.0, math.nan], [math.nan] * 3]), 2).tolist() == [[1, -1], [-1, -1]]


@given(score_rows(), st.data())
def test_candidate_blocks(drawn: tuple[list[list[float]], int], data: st.DataObject) -> None:
    rows, size = drawn
    width = len(rows[0]) if rows else 4 * size
    keep, seen = data.draw(st.integers(1, 8)), [data.draw(st.integers(0, width)) for _ in rows]
    rows = [[s if g < n else -math.inf for g, s in enumerate(row)] for row, n in zip(rows, seen, strict=True)]
    expected = []
    for row, n in zip(rows, seen, strict=True):
        blocks = [max(row[b * size : (b + 1) * size]) for b in range(width // size)]
        if n:
            blocks[(n - 1) // size] = math.inf
        kept = best_first(blocks, keep)
        expected.append([g // size in kept for g in range(width)])
    mask = candidate_mask(as_rows(rows, width), torch.tensor(seen, dtype=torch.int64), keep, size)
    assert mask.tolist() == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 2 * HEADS_AT_ONCE + 1), st.integers(0, 3), st.integers(0, 5))
def test_scores(seed: int, heads: int, queries: int, entries: int) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(2, queries, heads, 8).bfloat16(), torch.randn(2, entries, 8).bfloat16()
    w = torch.randn(2, queries, heads)
    ours = index_scores(q, k, w)
    assert ours.shape == (2, queries, entries) and ours.dtype == torch.float32
    for r in range(2):
        for i in range(queries):
            for g in range(entries):
                matches = (q[r, i].double() @ k[r, g].double()).clamp(min=0)
                terms = (w[r, i].double() * matches).tolist()
                assert abs(float(ours[r, i, g]) - sum(terms)) <= 1e-5 * sum(map(abs, terms)) + 1e-6


def test_entries_of_blocks() -> None:
    assert entries_of(torch.arange(3), 4).tolist() == list(range(12))
