"""Tiers of a piece: which code a call takes, what is known of sizes while each is compiled, what runs beyond them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41._compat import known_equal
from v41._compat_ranges import sizes_at_most
from v41.lowering import inductor
from v41.lowering.inductor import compile_piece
from v41.lowering.tiers import chooser, distinct
from v41.model_def.buckets import Buckets

INT32 = 2**31 - 1


def inputs(rows: int) -> tuple[int, Tensor, Tensor]:
    """What a traced function of two row tensors takes: the row symbol, then the tensors."""
    x, y = torch.randn(2, rows, 48, generator=torch.Generator().manual_seed(rows))
    return rows, x, y


def piece() -> tuple[GraphModule, list[Any], str]:
    """A graph over rows, the meta of its inputs, and the symbol of its rows."""
    gm = trace(lambda x, y: (x * y + 1) / (x.abs() + 2), *inputs(5)[1:])
    metas = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return gm, metas, str(metas[1].shape[0])


def test_ranges_hold_while_they_are_set_and_no_longer() -> None:
    _, metas, rows = piece()
    size = metas[1].shape[0]

    def counts_in_32_bits() -> bool:
        return known_equal(torch.sym_max(size * 20480, INT32), INT32)

    assert not counts_in_32_bits()
    guards = list(size.node.shape_env.guards)
    with sizes_at_most(metas, {rows: 65536}):
        assert counts_in_32_bits()
        with sizes_at_most(metas, {rows: 8}):
            assert known_equal(torch.sym_max(size, 8), 8)
        assert counts_in_32_bits() and not known_equal(torch.sym_max(size, 8), 8)
    assert not counts_in_32_bits()
    assert size.node.shape_env.guards == guards and not size.node.shape_env.var_to_hint_override


def test_ranges_are_lifted_when_compiling_fails() -> None:
    _, metas, rows = piece()
    with pytest.raises(ZeroDivisionError), sizes_at_most(metas, {rows: 8}):
        raise ZeroDivisionError
    assert not known_equal(torch.sym_max(metas[1].shape[0], 8), 8)


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(0, 50))
def test_a_call_takes_the_first_tier_that_holds_it(limits: list[int], rows: int) -> None:
    _, metas, symbol = PIECE
    tiers = [{symbol: most} for most in limits]
    expected = next((i for i, most in enumerate(limits) if rows <= most), len(limits))
    assert chooser(tiers, metas)(inputs(rows)) == expected


def test_a_size_that_no_input_has_alone_limits_nothing() -> None:
    _, metas, rows = PIECE
    assert distinct([{rows: 4, "u77": 1}, {"u77": 9}, {rows: 9}], metas) == [{rows: 4}, {}]
    assert distinct([{rows: 4}, {rows: 4, "u77": 1}, {rows: 9}], metas) == [{rows: 4}, {rows: 9}]


def test_each_tier_is_compiled_under_its_own_range(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, metas, rows = piece()
    size, seen = metas[1].shape[0], []

    def compiled(flat: GraphModule, values: object, settings: object, mark: object, known: str) -> Any:
        place = len(seen)
        seen.append((known, known_equal(torch.sym_max(size, 8), 8), known_equal(torch.sym_max(size, 64), 64)))
        return lambda args: (place, args[0])

    monkeypatch.setattr(inductor, "inductor_compile", compiled)
    run = compile_piece(gm, "piece 3", tiers=({rows: 8}, {rows: 64}), beyond=lambda *args: ("beyond", args[0]))
    assert [(small, wide) for _, small, wide in seen] == [(True, True), (False, True)]
    assert len({known for known, *_ in seen}) == 2  # Inductor's cache tells them apart by it
    assert [run(*inputs(n))[0] for n in (0, 8, 9, 64, 65)] == [0, 0, 1, 1, "beyond"]


def test_every_tier_computes_the_same() -> None:
    gm, _, rows = piece()
    run = compile_piece(gm, "piece 3", tiers=({rows: 8}, {rows: 64}), beyond=gm)
    for n in (0, 1, 8, 9, 64, 65):
        assert torch.equal(run(*inputs(n))[0], gm(*inputs(n))[0]), n


def test_a_batch_has_two_ranges_and_other_programs_none() -> None:
    names = {"u0": "rows", "u1": "longest", "u2": "blocks of ratio 2", "u3": "tokens.0"}
    decode, wide = Buckets().ranges(names)
    assert decode == {"u0": Buckets().decode[-1], "u1": 1, "u2": Buckets().blocks[-1]} and wide.keys() == {"u0"}
    assert wide["u0"] * 4 * 5120 <= INT32 < 2 * wide["u0"] * 4 * 5120
    assert wide["u0"] > Buckets().prefill[-1]
    assert Buckets().ranges({"u0": "tokens.0"}) == ()


PIECE = piece()
