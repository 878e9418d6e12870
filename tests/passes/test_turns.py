"""The formula by which turns.py knows RoPE is that of the plain model; its four forms differ."""

from __future__ import annotations

from itertools import combinations, product

import torch

from tests.strategies.tracing import trace
from v41.model_def.rope import Turn, rotate
from v41.passes.turns import rotation_to, turn


def test_adjacent_last_channels_turn_as_in_the_plain_model() -> None:
    x, cos, sin = torch.randn(5, 3, 16), torch.randn(5, 4), torch.randn(5, 4)
    for inverse, sign in ((False, 1), (True, -1)):
        found = turn(x, cos[:, None], sign * sin[:, None], "adjacent", "last")
        assert torch.equal(found, rotate(x, Turn(cos, sin), inverse=inverse))


def test_the_forms_differ() -> None:
    x, cos, sin = torch.randn(5, 3, 16), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    found = [turn(x, cos, sin, *form) for form in product(("adjacent", "halves"), ("last", "first"))]
    assert not any(torch.equal(a, b) for a, b in combinations(found, 2))


def test_a_turn_there_and_back_is_none() -> None:
    x, angle = torch.randn(5, 3, 16, dtype=torch.float64), torch.randn(5, 1, 8, dtype=torch.float64)
    for form in product(("adjacent", "halves"), ("last", "first")):
        there = turn(x, angle.cos(), angle.sin(), *form)
        assert torch.allclose(turn(there, angle.cos(), -angle.sin(), *form), x, atol=1e-12)


def test_tables_for_more_channels_than_a_head_has_are_none() -> None:
    gm = trace(lambda x, a, b: x * a + x * b, *(torch.rand(5, 8) for _ in range(3)))
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    (result,) = next(node for node in order if node.op == "output").args[0]
    assert rotation_to(order, result, 8) is None
