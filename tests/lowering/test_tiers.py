"""Tiers of a piece: which code a call takes, what is known of sizes while each is compiled, what runs beyond them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41 import _compat_sizes, artifact_store
from v41._compat import known_equal
from v41._compat_sizes import Numbers, with_sizes
from v41._compat_trace import functional_aten
from v41.backend import granted_by
from v41.lowering import inductor
from v41.lowering.inductor import InductorPiece, compile_piece
from v41.lowering.rewrites import Rewrites
from v41.lowering.tiers import Tier, chooser, distinct
from v41.model_def.buckets import Buckets

INT32 = 2**31 - 1


def inputs(rows: int) -> tuple[int, Tensor, Tensor]:
    """What a traced function of two row tensors takes: the row symbol, then the tensors."""
    x, y = torch.randn(2, rows, 48, generator=torch.Generator().manual_seed(rows))
    return rows, x, y


def piece(fn: Any = lambda x, y: (x * y + 1) / (x.abs() + 2)) -> tuple[GraphModule, list[Any], str]:
    """A graph over rows, the meta of its inputs, and the symbol of its rows."""
    gm = trace(fn, *inputs(5)[1:])
    metas = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return gm, metas, str(metas[1].shape[0])


def sizes_of_outputs(gm: GraphModule) -> list[Any]:
    return [node.meta["val"].shape[0] for node in gm.graph.output_node().args[0]]


def test_a_program_gets_sizes_that_may_be_asked_about_and_keeps_its_own() -> None:
    gm, metas, rows = piece()
    sized = with_sizes(gm, {rows: 65536})
    (size,) = sizes_of_outputs(sized.gm)
    assert size is not None and known_equal(size, sized.metas[1].shape[0]) and known_equal(size, sized.metas[0])
    assert known_equal(torch.sym_max(size * 20480, INT32), INT32) and known_equal(torch.sym_min(size, 2), 2)
    assert not known_equal(torch.sym_max(size * 65536, INT32), INT32)
    assert sized.conditions() == []
    assert size > 2 and size % 16 == 0 and size * 65536 <= INT32  # so the likely value is: asked for, and noted
    assert sized.conditions() == [f"{rows} > 2", f"({rows} % 16) == 0", f"65536*{rows} <= {INT32}"]
    assert str(metas[1].shape[0]) == rows and sizes_of_outputs(gm) == [metas[1].shape[0]]
    assert not metas[1].shape[0].node.shape_env.guards


def test_a_limit_of_one_is_a_number() -> None:
    gm, _, rows = piece()
    sized = with_sizes(gm, {rows: 1})
    assert sizes_of_outputs(sized.gm) == [1] and sized.metas[0] == 1 and sized.conditions() == []


def test_what_is_computed_from_a_number_is_one() -> None:
    """Sizes of views hang on nodes that multiply sizes."""
    gm = trace(lambda x, y: (x.flatten() + 1).view(y.shape[0], 6, -1), *inputs(5)[1:])
    rows = str(next(node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"))
    sized = with_sizes(gm, {rows: 1})
    assert sizes_of_outputs(sized.gm) == [1]
    values = [node.meta.get("val") for node in sized.gm.graph.nodes]
    assert not [value for value in values if isinstance(value, torch.SymInt)]


def test_a_size_taken_for_its_likely_value_is_noticed() -> None:
    gm, _, rows = piece()
    sized = with_sizes(gm, {rows: 64})
    assert not sized.is_pinned()
    assert sized.metas[0] == 4 and sized.is_pinned() and sized.conditions() == [f"{rows} == 4"]


def test_sizes_computed_from_a_symbol_follow_it() -> None:
    gm = trace(lambda x: torch.cat((x, x)).flatten(), torch.randn(5, 8))
    rows = str(next(node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"))
    sized = with_sizes(gm, {rows: 64})
    assert known_equal(sizes_of_outputs(sized.gm)[0], sized.metas[0] * 16)


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(0, 50))
def test_a_call_takes_the_first_tier_that_holds_it(limits: list[int], rows: int) -> None:
    _, metas, symbol = PIECE
    tiers = [Tier({symbol: most}) for most in limits]
    expected = next((i for i, most in enumerate(limits) if 0 < rows <= most), len(limits))
    assert chooser(tiers, metas)(inputs(rows)) == expected


@given(st.integers(0, 40))
def test_a_call_takes_no_tier_whose_conditions_it_breaks(rows: int) -> None:
    _, metas, symbol = PIECE
    choose = chooser([Tier({symbol: 30}, (f"{symbol} % 4 == 0",)), Tier({}, (f"{symbol} != 7",))], metas)
    expected = 2 if rows in (0, 7) else 0 if rows % 4 == 0 and rows <= 30 else 1
    assert choose(inputs(rows)) == expected


def test_conditions_are_read_one_by_one_and_may_call_what_torch_prints() -> None:
    _, metas, symbol = PIECE
    choose = chooser([Tier({symbol: 30}, (f"{symbol} < 5 or {symbol} > 9", f"math.trunc({symbol} / 2) < 20"))], metas)
    assert [choose(inputs(rows)) for rows in (1, 7, 12, 31, 50)] == [0, 1, 0, 1, 1]
    roots = Tier({}, (f"torch.sym_float({symbol}) ** 0.5 > 2.0",))
    assert [chooser([roots], metas)(inputs(rows)) for rows in (4, 5)] == [1, 0]


@pytest.mark.parametrize(
    ("fn", "kept_away"),
    [
        (lambda x, y: x[:2] * y[-2:], True),
        (lambda x, y: x.squeeze(0) * 2, True),
        (lambda x, y: (x[-1] * 2, x.unsqueeze(1) + y, x @ y.mT, x.view(-1, 6, 8).sum(1)), False),
    ],
)
def test_ones_are_kept_away_from_code_that_has_other_sizes(fn: Any, kept_away: bool) -> None:
    gm, _, rows = piece(fn)
    assert with_sizes(gm, {rows: 64}).conditions() == ([f"{rows} > 1"] if kept_away else [])
    assert with_sizes(gm, {rows: 1}).conditions() == []


def test_a_piece_is_tried_with_ones_once_for_all_its_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _, rows = piece(lambda x, y: x[:2] * y[-2:])
    tried: list[Any] = []
    propagated = _compat_sizes._propagated

    def counting(gm: GraphModule, sizes: Any, mode: Any) -> Any:
        tried.extend(size for size in sizes.values() if isinstance(size, int))
        return propagated(gm, sizes, mode)

    monkeypatch.setattr(_compat_sizes, "_propagated", counting)
    numbers = Numbers(gm)
    tiers = [({rows: 64}, False), ({rows: 65536}, False), ({rows: 65536}, True), ({rows: 8}, False)]
    found = [with_sizes(gm, limits, large=large, numbers=numbers).conditions() for limits, large in tiers]
    assert found == [[f"{rows} > 1"]] * 4 and tried == [1]


def test_sizes_beside_a_one_are_those_of_the_tier_where_they_must_be() -> None:
    """A limit of one in the first tier is no number for the second, nor is a likely size above a later limit."""
    gm = trace(lambda x, y: x.sum(0) + y[:2], torch.randn(5, 8), torch.randn(6, 8), sizes=("one", "other"))
    metas = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    one, other = (str(meta.shape[0]) for meta in metas if isinstance(meta, Tensor))
    numbers = Numbers(gm)
    tiers = [{one: 1, other: 640}, {one: 640, other: 640}, {one: 4, other: 4}]
    found = [with_sizes(gm, limits, numbers=numbers).conditions() for limits in tiers]
    assert found == [[f"{other} > 1"]] * 3
    assert numbers.known.keys() == {(1, 1), (1, 40), (40, 1), (1, 2), (2, 1)}


def test_one_code_for_all_takes_no_rows_as_well() -> None:
    assert chooser([Tier()], PIECE[1])(inputs(0)) == 0


def test_a_size_that_no_input_has_alone_limits_nothing() -> None:
    _, metas, rows = PIECE
    assert distinct([{rows: 4, "u77": 1}, {"u77": 9}, {rows: 9}], metas) == [{rows: 4}, {}]
    assert distinct([{rows: 4}, {rows: 4, "u77": 1}, {rows: 9}], metas) == [{rows: 4}, {rows: 9}]


def test_a_piece_whose_call_does_not_tell_every_size_has_no_tiers() -> None:
    gm = trace(lambda x: x.flatten()[:, None] + 1, torch.randn(5, 8))
    flattened = next(node.meta["val"] for node in gm.graph.nodes if node.name.startswith("view"))
    assert distinct([{"u0": 4}], [flattened]) == [] and distinct([{"u0": 4}], [torch.ones(3)]) == []


def test_each_tier_is_compiled_over_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _, rows = piece()
    seen = []

    def compiled(flat: GraphModule, values: list[Any], settings: object, mark: object, known: str) -> Any:
        place, (size,) = len(seen), sizes_of_outputs(flat)
        small = known_equal(torch.sym_max(size, 8), 8)
        seen.append((known, small, known_equal(torch.sym_max(size, 64), 64)))
        assert small or size != 33  # taken for granted of the wide one
        return lambda args: (place, args[0])

    monkeypatch.setattr(inductor, "inductor_compile", compiled)
    run = compile_piece(gm, "piece 3", tiers=({rows: 8}, {rows: 64}), beyond=lambda *args: ("beyond", args[0]))
    assert [(small, wide) for _, small, wide in seen] == [(True, True), (False, True), (False, True)]
    assert len({known for known, *_ in seen}) == 3  # Inductor's cache tells them apart by it
    assert [run(*inputs(n))[0] for n in (1, 8, 9, 64)] == [0, 0, 1, 1]
    assert [run(*inputs(n))[0] for n in (0, 33, 65)] == ["beyond"] * 3
    assert run.granted == (f"{rows} != 33",)
    assert granted_by([run, run, object()], {rows: "rows"}) == ["rows != 33"]  # what the report tells


def test_what_32_bits_cannot_count_has_code_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _, rows = piece()

    def compiled(flat: GraphModule, values: list[Any], settings: object, mark: object, known: str) -> Any:
        (size,) = sizes_of_outputs(flat)
        fits = bool(size * (1 << 18) <= INT32)
        return lambda args: ("32 bits" if fits else "64 bits",)

    monkeypatch.setattr(inductor, "inductor_compile", compiled)
    run = compile_piece(gm, "piece 3", tiers=({rows: 64}, {rows: 65536}), beyond=gm)
    assert [run(*inputs(n)) for n in (64, 8191, 8192, 20000)] == [("32 bits",)] * 2 + [("64 bits",)] * 2
    assert len(run.codes) == 3


def test_every_tier_computes_the_same() -> None:
    gm, _, rows = piece(lambda x, y: ((x * y).view(-1, 6, 8).sum(1) + 1, x.mT @ y))
    run = compile_piece(gm, "piece 3", tiers=({rows: 8}, {rows: 64}), beyond=gm)
    for n in (0, 1, 2, 8, 9, 64, 65):
        assert all(map(torch.equal, run(*inputs(n)), gm(*inputs(n)))), n


def test_tiers_are_compiled_inside_a_backend_too() -> None:
    """There AOTAutograd's own fake tensors are on."""
    runs: list[Any] = []

    def inference(gm: GraphModule, inputs: Any) -> Any:
        rows = str(next(node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"))
        runs.append(compile_piece(gm, "piece 3", tiers=({rows: 8}, {rows: 64}), beyond=gm))
        return functional_boxed(runs[-1])

    def both(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.pad((x * y).view(-1, 6, 8).sum(1), (0, 3)) + torch.arange(11)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return functional_aten(gm, inputs, inference, inference)

    torch.compiler.reset()
    compiled = torch.compile(both, backend=backend, fullgraph=True)
    for rows in (5, 1, 8, 9, 64, 65):
        x, y = inputs(rows)[1:]
        for tensor in (x, y):
            torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id="rows")
        with torch.no_grad():
            assert torch.equal(compiled(x, y), both(x, y)), rows
    (run,) = runs
    assert len(run.codes) == 2


def functional_boxed(run: Any) -> Any:
    def call(args: list[Any]) -> Any:
        return run(*args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def test_a_piece_with_tiers_can_be_stored_and_keeps_its_conditions() -> None:
    gm, _, rows = piece(lambda x, y: (x * y + 1, x.mT @ y))
    run = compile_piece(gm, "piece 3", tiers=({rows: 8}, {rows: 64}), beyond=refuse)
    again = pickle.loads(artifact_store.pickled(run))
    assert len(again.codes) == len(run.codes) >= 2
    for n in (1, 2, 8, 9, 64):
        assert again.choose(inputs(n)) == run.choose(inputs(n))
        assert all(map(torch.equal, again(*inputs(n)), gm(*inputs(n)))), n
    with pytest.raises(ZeroDivisionError):
        again(*inputs(65))


def refuse(*args: object) -> Any:
    raise ZeroDivisionError


def test_a_stored_piece_still_tells_what_was_put_another_way() -> None:
    rewrites = Rewrites(1, 2, 3, 4)
    make, facts = InductorPiece(lambda args: None, lambda args: 0, [], None, rewrites, ("u0 > 1",)).__reduce__()
    again = make(*facts)
    assert (again.rewrites, again.granted) == (rewrites, ("u0 > 1",))


def test_a_batch_has_two_ranges_and_other_programs_none() -> None:
    names = {"u0": "rows", "u1": "longest", "u2": "blocks of ratio 2", "u3": "tokens.0"}
    decode, wide = Buckets().ranges(names)
    assert decode == {"u0": Buckets().decode[-1], "u1": 1, "u2": Buckets().blocks[-1]} and wide.keys() == {"u0"}
    assert wide["u0"] * 4 * 5120 <= INT32 < 2 * wide["u0"] * 4 * 5120
    assert wide["u0"] > Buckets().prefill[-1]
    assert Buckets().ranges({"u0": "tokens.0"}) == ()


PIECE = piece()
