"""outline_engram finds look-ups and gates in any spelling, reads their numbers off the graph, names broken rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from tests.invariants import apply, check_fired_share, check_pass, copy_program
from tests.strategies.engrams import (
    DOTS,
    GATE_FLAWS,
    LOOKUP_FLAWS,
    MASKS,
    ROOTS,
    TABLE,
    Gate,
    Lookup,
    Part,
    flawed_gates,
    flawed_lookups,
    legal_gates,
    legal_lookups,
    together,
)
from tests.strategies.norms import trace_as_is
from tests.strategies.tracing import trace
from v41.model_def.config import V41Config
from v41.model_def.engram import Engram
from v41.passes import engram_gates, engram_lookups, same_values
from v41.passes import outline_engram as module
from v41.passes.canonicalize import canonicalize
from v41.passes.engram_gates import GATE
from v41.passes.engram_lookups import LOOKUP
from v41.passes.outline_engram import RULES, outline_engram
from v41.passes.records import decode
from v41.regions import flatten
from v41.report import Decision

FEWER = settings(max_examples=settings.default.max_examples // 6, phases=[Phase.generate])
FLAWS = LOOKUP_FLAWS | GATE_FLAWS
ALL: tuple[Part, ...] = (
    Lookup(),
    Lookup((5, 7, 11, 13), 1, "index_select", "by order", "bfloat16", True, 64),
    Gate(),
    Gate("sign last", "einsum", "product", 1e-6, 1e-3, 0.25, 4, 24),
    Gate(mask="none", floor=1e-3),
)


@pytest.fixture(autouse=True)
def _drawn_for_all_that_regions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What divides, or indexes, is drawn so though it does it inside of a region."""
    drawn = same_values.random_inputs
    monkeypatch.setattr(same_values, "random_inputs", lambda gm, rows, **how: drawn(flatten(gm), rows, **how))


@cache
def traced(parts: tuple[Part, ...]) -> GraphModule:
    fn, tensors = together(parts)
    gm = trace_as_is(fn, tensors)
    apply(canonicalize, gm)
    return gm


def prepared(*parts: Part) -> GraphModule:
    return copy_program(traced(parts))


def check(decision: Decision, part: Part) -> bool:
    """Whether `part` became a region; it must say what it is, or name the rule of its flaw."""
    if part.flaw:
        assert decision.rule == FLAWS[part.flaw]
        return False
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    if isinstance(part, Gate):
        wanted: dict[str, Any] = {"streams": part.streams, "width": part.width, "eps": part.eps, "floor": part.floor}
        wanted["masked"] = part.mask != "none"
        assert attrs["scale"] == pytest.approx(part.scale)
        roles = ["streams", "key", "value", "weight", "weight", *["mask"] * (part.mask != "none")]
    else:
        orders = tuple(range(2, len(part.multipliers) + 1))
        tables = part.heads * len(orders)
        wanted = {"multipliers": part.multipliers, "orders": orders, "heads": part.heads, "tables": tables,
                  "width": part.width, "rows": TABLE, "stored": part.stored, "ids_alone": True,
                  "then": ("fp8",) * part.quantised}  # fmt: skip
        assert attrs["outputs"] == (("quantised",) if part.quantised else ("rows",))
        roles = ["ids", *["constant"] * 3, "table", *["table"] * (part.stored != "bfloat16")]
    assert {name: attrs.get(name) for name in wanted} == wanted
    assert sorted(attrs["operands"]) == sorted(roles)
    return True


def check_all(parts: Sequence[Part]) -> list[bool]:
    decisions = check_pass(outline_engram, prepared(*parts), (5,))
    assert len(decisions) == len(parts)
    return [check(decision, part) for decision, part in zip(decisions, parts, strict=True)]


def test_every_spelling_is_found() -> None:
    gates = [part for part in ALL if isinstance(part, Gate)]
    assert ({part.root for part in gates}, {part.dot for part in gates}) == (set(ROOTS), set(DOTS))
    assert {part.mask for part in gates} == set(MASKS)
    assert all(check_all(ALL))


def test_legal_parts_fire_and_flawed_ones_do_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(st.tuples(legal_lookups, flawed_gates, legal_gates, flawed_lookups))
    def draw(parts: tuple[Part, ...]) -> None:
        fired.extend(check_all(parts))

    draw()
    check_fired_share(fired)


FLAWED = (*(Lookup(flaw=flaw) for flaw in LOOKUP_FLAWS), *(Gate(flaw=flaw) for flaw in GATE_FLAWS))


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = list(FLAWS).index(flaw)
    assert [decision.rule for decision in apply(outline_engram, prepared(*FLAWED))] == list(FLAWS.values())
    without = {kind: tuple(pair for pair in rules if pair[0] != FLAWS[flaw]) for kind, rules in RULES.items()}
    monkeypatch.setattr(module, "RULES", without)
    try:
        decisions = apply(outline_engram, prepared(*FLAWED))
    except (AssertionError, KeyError, TypeError, ValueError):  # damage is as good
        return
    assert decisions[at].rule != FLAWS[flaw]


def test_every_rule_has_a_flaw() -> None:
    """The effect is one rule, one predicate, for both kinds."""
    assert set(FLAWS.values()) == {rule for rules in RULES.values() for rule, _ in rules}


def others(x: Tensor, ids: Tensor, table: Tensor, gate: Tensor) -> list[Tensor]:
    """A plain embedding, one of numbers modulo its size, a gated sum of other streams, SwiGLU in a residual."""
    hidden = torch.nn.functional.embedding(ids % 11, table)
    return [hidden, x + gate.sigmoid()[..., None] * x.flip(1), x + x * (x @ x.mT @ x).sigmoid()]


def test_other_tables_and_gates_are_no_sites() -> None:
    gm = trace_as_is(others, [torch.randn(5, 3, 8), torch.arange(5), torch.randn(11, 8), torch.randn(5, 3)])
    apply(canonicalize, gm)
    assert not any(decision.applied for decision in check_pass(outline_engram, gm, (5,)))


def test_rows_by_what_was_computed_hang_on_more_than_ids() -> None:
    """The same look-up, by ids that a float decided."""
    fn, (_, *rest) = together([Lookup()])
    gm = trace_as_is(lambda x, *given: fn((x * 10).long(), *given), [torch.rand(5, 3), *rest])
    apply(canonicalize, gm)
    (decision,) = apply(outline_engram, gm)
    assert decision.region is not None and decision.region.attrs["ids_alone"] is False


def test_rows_of_a_table_that_was_written_hang_on_what_was_written() -> None:
    """By ids of the caller's, of a table into whose scales a float went."""
    lookup, at = Lookup(), -2
    ids, *rest = lookup.tensors()

    def run(x: Tensor, ids: Tensor, *given: Tensor) -> Tensor:
        given[at].add_((x.sum() > 9).to(torch.uint8))
        (rows,) = lookup.run(ids, *given)
        return rows

    gm = trace(run, torch.randn(5, 8), ids, static=rest)
    apply(canonicalize, gm)
    (decision,) = apply(outline_engram, gm)
    assert decision.region is not None and decision.region.attrs["ids_alone"] is False


WRONG: dict[str, tuple[Any, str, Any]] = {  # bugs that keep every value: what a region says of itself is wrong
    "whatever it reads is ids": (engram_lookups.Lookup, "role", lambda site, arg: "ids"),
    "any look-up can wait": (engram_lookups.Lookup, "hangs_on_ids_alone", lambda site, read: False),
    "no decoding is known": (engram_lookups, "decode", lambda record, *form: 2 * decode(record, *form)),
    "any gate is one": (engram_gates.Gate, "formula", engram_gates.Formula(1e-20, 1.0, 0.0)),
    "any hash is one": (engram_lookups.Lookup, "hash", engram_lookups.Hash((1, 1, 1), (2, 3))),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[bug])
    with pytest.raises((AssertionError, AttributeError)):
        decisions = apply(outline_engram, prepared(*ALL))
        for decision, part in zip(decisions, ALL, strict=True):
            check(decision, part)


def test_the_engram_of_the_plain_model() -> None:
    """One look-up that hangs on ids alone, one gate, with the numbers of the config."""
    config = V41Config.preset("tiny").replace(weight_dtype="fp8")
    engram = Engram(config, config.engram_layer_ids[1])
    X = torch.randn(5, config.hc_mult, config.hidden_size).bfloat16()
    orders = config.engram_max_ngram_size - 1
    gm = trace(engram, X, torch.randint(-1, 9, (5, orders + 1)))
    apply(canonicalize, gm)
    lookup, gate = (decision.region for decision in check_pass(outline_engram, gm, (0, 1, 5)))
    assert lookup is not None and gate is not None and (lookup.kind, gate.kind) == (LOOKUP, GATE)
    assert lookup.attrs["multipliers"] == engram.multipliers and lookup.attrs["ids_alone"]
    found = lookup.attrs["tables"], lookup.attrs["heads"], lookup.attrs["width"], lookup.attrs["rows"]
    heads = config.engram_n_heads
    assert found == (orders * heads, heads, config.engram_head_dim, engram.embed.weight.shape[0])
    assert (lookup.attrs["stored"], lookup.attrs["then"]) == ("fp8/32", ("fp8",))
    numbers = gate.attrs["eps"], gate.attrs["scale"], gate.attrs["floor"], gate.attrs["streams"]
    assert numbers == (config.rms_norm_eps, config.hidden_size**-0.5, 1e-6, config.hc_mult)
