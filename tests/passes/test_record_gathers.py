"""Gathers of records are read for what they are in every spelling of places and slots, and what is none is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.invariants import apply
from tests.strategies.norms import trace_as_is
from tests.strategies.record_gathers import ENTRIES, NO_PICKS, PLACES, SLOT
from v41.passes.canonicalize import canonicalize
from v41.passes.record_gathers import Gather, gather_of

T, K, S = 5, 3, 4
CACHE, RECORDS = (torch.zeros(*sizes, 17, dtype=torch.uint8) for sizes in ((S, ENTRIES), (T,)))
SLOTS, PICKS, SEEN = torch.arange(T) % S, torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K, dtype=torch.bool)


def read(
    fn: Callable[..., Any], *, picked: bool = True, shows_hidden: bool = False, picks_as: torch.dtype = torch.int64
) -> Gather | None:
    """What makes the first result of `fn`, which takes a cache, slots, picks, records of the step and what is of it."""
    gm = trace_as_is(fn, [CACHE, SLOTS, PICKS.to(picks_as), RECORDS, SEEN])
    apply(canonicalize, gm)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    picks, (records, *_) = gm.graph.find_nodes(op="placeholder")[2], gm.graph.output_node().all_input_nodes
    return gather_of(order, records, "picked", picks if picked else None, shows_hidden=shows_hidden)


def roles(gather: Gather | None) -> list[str]:
    return [] if gather is None else sorted(gather.operands.values())


@pytest.mark.parametrize("slot", SLOT)
@pytest.mark.parametrize("places", PLACES)
def test_places_are_picks_where_they_are_these_wherever_it_matters(places: str, slot: str) -> None:
    gather = read(lambda cache, slots, picks, *_: cache[SLOT[slot](slots, K), PLACES[places](picks)])
    assert gather is not None and gather.source == "slots"
    assert roles(gather) == ["picked", "picked_places" if places in NO_PICKS else "picks", "slots"]
    assert gather.nodes[-1].target is torch.ops.aten.index.Tensor
    assert {gather.of(role): role for role in roles(gather)} == gather.operands and gather.of("rows") is None


def test_a_hidden_key_that_shows_lies_where_the_picks_say() -> None:
    at_the_end = read(
        lambda cache, slots, picks, *_: cache[slots[:, None], PLACES["the last"](picks)], shows_hidden=True
    )
    assert roles(at_the_end) == ["picked", "picked_places", "slots"]


def test_without_picks_places_are_an_operand() -> None:
    found = read(lambda cache, slots, picks, *_: cache[slots[:, None], picks.clamp(min=0)], picked=False)
    assert roles(found) == ["picked", "picked_places", "slots"]


def test_picks_may_come_in_a_narrower_type() -> None:
    found = read(
        lambda cache, slots, picks, *_: cache[slots[:, None], picks.clamp(min=0).long()], picks_as=torch.int32
    )
    assert roles(found) == ["picked", "picks", "slots"]
    narrowed = read(lambda cache, slots, picks, *_: cache[slots[:, None], picks.clamp(min=0).int()])
    assert roles(narrowed) == ["picked", "picked_places", "slots"]


def test_places_on_whose_way_others_read_are_an_operand() -> None:
    def run(cache: Tensor, slots: Tensor, picks: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        low = picks.clamp(min=0)
        return cache[slots[:, None], torch.where(picks < 0, 0, low)], low

    assert roles(read(run)) == ["picked", "picked_places", "slots"]


def test_records_of_the_step_are_chosen_by_a_bool_a_key() -> None:
    found = read(
        lambda cache, slots, picks, records, seen: torch.where(
            seen.unsqueeze(-1), records[picks], cache[slots[:, None], picks.clamp(min=0)]
        ),
        picked=False,
    )
    assert found is not None and found.source == "step"
    assert roles(found) == ["picked", "picked_in_step", "picked_places", "picked_records", "picked_rows", "slots"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda cache, slots, picks, *_: cache[slots[:, None], picks].flip(-1),
        lambda cache, slots, picks, *_: cache[torch.zeros_like(picks), picks],
        lambda cache, slots, picks, *_: cache[slots[:, None], torch.arange(K)],
        lambda cache, slots, picks, *_: cache[0][picks],
        lambda cache, slots, picks, records, seen: torch.where(seen[..., None], cache[slots[:, None], picks], 0),
        lambda cache, slots, picks, records, seen: torch.where(
            seen[:, :1, None], records[picks], cache[slots[:, None], picks]
        ),
    ],
    ids=["bytes in another order", "a slot a key", "places for all rows", "one slot", "no record", "a bool a row"],
)
def test_what_is_no_gather_is_none(fn: Callable[..., Tensor]) -> None:
    assert read(fn) is None
