"""lockstep names what gives a row other bits among many: a call of a library, or a piece's own kernels, and nothing
that only stands behind it. `v41 bench alone` fails where that is a generated kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.plans import plan
from v41.lowering.generated import GeneratedPiece
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.bench import alone
from v41.tools.cli import main
from v41.tools.inspect import first_layers
from v41.tools.lockstep import Broken, alike, lockstep, off

DOUBLE = plan("x", "z", "a: x -> y, x", "b: y -> z, y")
X = torch.arange(24.0).reshape(6, 4) + 1


def scaled(x: Tensor) -> tuple[Tensor]:
    return (x * 3,)


def summed(x: Tensor) -> tuple[Tensor]:
    """What no row should do: look at the others. Behind the sum all is even."""
    return ((x + x.sum(0, keepdim=True)).cos() * 2,)


def held(run: Callable[..., Any], x: Tensor = X) -> list[Broken]:
    return lockstep(DOUBLE, {"a": run, "b": scaled}, [x], [x[:1].clone()], slot=0)


def kernel(launch: Callable[..., Any]) -> GeneratedPiece:
    """A generated piece whose kernel does that."""
    return GeneratedPiece(SimpleNamespace(launch=launch), lambda args: None)  # type: ignore[arg-type]


def test_where_rows_are_alike_nothing_is_told() -> None:
    assert held(scaled) == [] and held(kernel(scaled)) == []


def test_the_call_that_looks_at_other_rows_is_named_and_not_what_follows_it() -> None:
    (found,) = held(summed)
    assert (found.piece, found.runs, found.values) == ("a", "eager", {})
    assert found.calls == {"aten.sum.dim_IntList of [6, 4]": pytest.approx(80 / 84)}  # 66 to 84 : 1 to 4


def test_a_kernel_that_torch_cannot_see_is_told_by_what_it_returns() -> None:
    (found,) = held(kernel(summed))
    assert (found.runs, found.calls, list(found.values)) == ("generated", {}, ["y"])


def test_a_kernel_in_front_of_a_call_is_not_the_doing_of_the_call() -> None:
    def unseen(x: Tensor) -> tuple[Tensor]:
        with torch.utils._python_dispatch._disable_current_modes():
            y = x + x.sum(0, keepdim=True)
        return (y.exp2(),)

    (found,) = held(unseen)
    assert found.calls == {} and list(found.values) == ["y"]


def test_rows_may_lie_elsewhere_among_many() -> None:
    def in_order(x: Tensor) -> tuple[Tensor]:
        order = (-x[:, 0]).argsort()
        return ((x[order] * 2)[order.argsort()],)

    def of_another(x: Tensor) -> tuple[Tensor]:
        order = (-x[:, 0]).argsort()
        return ((x[order] * len(x))[order.argsort()],)

    assert held(in_order) == []
    (found,) = held(of_another)
    assert list(found.calls) == ["aten.mul.Tensor of [6, 4]"] and found.values == {}


def test_other_calls_among_many_are_told_as_such() -> None:
    (found,) = held(lambda x: (x * 3 if len(x) > 1 else x + x + x,))
    assert list(found.calls) == ["aten.add.Tensor where many rows call aten.mul.Tensor"]


def test_of_a_cache_the_slot_of_the_row_counts_and_both_go_on_with_the_same() -> None:
    made = plan("x cache", "y", "a: x cache* ->", "b: cache -> y")

    def write(spoil: float, x: Tensor, cache: Tensor) -> tuple[()]:
        cache.index_copy_(0, torch.arange(len(x)), x + spoil * len(x))
        return ()

    for spoil in (0.0, 1.0):
        caches = torch.zeros(6, 4), torch.zeros(6, 4)
        artifacts = {"a": lambda x, cache, spoil=spoil: write(spoil, x, cache), "b": lambda cache: (cache[:1] * 2,)}
        found = lockstep(made, artifacts, [X, caches[0]], [X[:1].clone(), caches[1]], slot=0)
        assert [each.piece for each in found] == ["a"] * (spoil > 0)
        assert torch.equal(caches[0][0], caches[1][0])


def test_bits_count_not_values() -> None:
    assert alike(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan]))
    assert not alike(torch.tensor([0.0, 1.0]), torch.tensor([-0.0]))
    assert not alike(torch.ones(2, 3), torch.ones(2, 4)) and off(torch.ones(2, 3), torch.ones(2, 4)) == 1
    assert alike(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[3, 4]]))  # another's row, as a whole


@pytest.mark.parametrize("runs, equal, code", [("inductor", 3, 0), ("generated", 3, 1), (None, 4, 0), (None, 3, 1)])
def test_a_generated_kernel_or_a_difference_without_a_cause_fails(runs: str | None, equal: int, code: int) -> None:
    found = [Broken("piece_1", "1f", runs, "seam", "mhc.py:3", {}, {"h": 1e-3})] if runs else []
    result = {"logits": {"rows": 4, "equal": equal, "off": 1e-3}, "calls": alone.told(found)}
    assert alone.holds(result) == (code == 0)
    assert ("a generated kernel is among" in alone.line(result)) == (runs == "generated")


class Planted(V41ForCausalLM):
    """Its logits look at those of other rows."""

    def forward(self, batch: Any, cache: Any) -> Tensor:
        logits = super().forward(batch, cache)
        return logits + logits.amax(0, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_the_command_names_a_planted_operation(planted: bool, tmp_path: Path, monkeypatch: Any) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(alone, "V41ForCausalLM", Planted if planted else V41ForCausalLM)
    monkeypatch.setattr(alone, "cut", lambda config: first_layers(config, 1))
    asked = ["bench", "alone", "--preset", "tiny", "--cut", "--device", "cpu", "--rows", "4", "--context", "12"]
    assert V41Config.preset("tiny").num_hidden_layers > 1
    assert main([*asked, "--out", str(tmp_path / "alone.json")]) == 0
    found = json.loads((tmp_path / "alone.json").read_text())
    assert {"commit", "logits", "compiled", "broken", "calls"} <= found.keys() and found["logits"]["rows"] == 4
    assert any("amax" in each["call"] for each in found["calls"]) == planted
    assert planted is False or found["logits"]["equal"] == 0
