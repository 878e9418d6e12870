"""Every meaning of integers is needed: without it rows told apart by number, or kept by a ring, are all read."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from tests.passes.test_row_rules import Writer, demanded_of
from tests.strategies.rows import SLOTS, WIDTH, WINDOW
from v41.passes.analysis.meanings import MEANINGS, Meaning
from v41.passes.analysis.rows import EVERY

aten, prims = torch.ops.aten, torch.ops.prims
Numbers = Callable[[Writer, Node], Node]  # of rows [T] -> what x is indexed by
Program = Callable[[Writer, Node], Node]  # x -> a result whose rows are x's, or rows before


def count(write: Writer) -> Node:
    return write(aten.sym_size.int, write.inputs["x"], 0)


def rows(write: Writer) -> Node:
    how = {"start": 0, "step": 1, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
    return write(prims.iota.default, count(write), **how)


def whole(write: Writer, value: int) -> Node:
    return write(aten.scalar_tensor.default, value, dtype=torch.int64)


def by_number(numbers: Numbers) -> Program:
    return lambda write, x: write(aten.index.Tensor, x, [numbers(write, rows(write))])


def before(op: Any, shift: int) -> Program:
    """x of two rows before, the first row where there is none."""
    return by_number(lambda write, row: write(aten.clamp_min.default, write(op, row, shift), 0))


def no_less(op: Any, number: Callable[[Writer], object]) -> Program:
    return by_number(lambda write, row: write(op, write(aten.sub.Tensor, row, 2), number(write)))


def moved(op: Any, *args: Any) -> Program:
    return by_number(lambda write, row: write(op, row, *args))


def moved_column(op: Any, *args: Any) -> Program:
    """Of numbers [T, 1]."""
    return by_number(lambda write, row: write(op, write(aten.unsqueeze.default, row, 1), *args))


def picks(divide: Numbers) -> Program:
    """Each channel as the pick of an expert, sorted and back."""

    def program(write: Writer, x: Node) -> Node:
        keys = write(aten.view.default, x, [-1])
        order = write(operator.getitem, write(aten.sort.stable, keys, stable=True, dim=0), 1)
        back = write(operator.getitem, write(aten.sort.stable, order, stable=True, dim=0), 1)
        y = write(aten.index.Tensor, write(aten.index.Tensor, x, [divide(write, order)]), [back])
        return write(aten.sum.dim_IntList, write(aten.view.default, y, [-1, WIDTH, WIDTH]), [1])

    return program


def ring(last: Numbers, number: Numbers = lambda write, _: whole(write, SLOTS), *, first: bool = False) -> Program:
    """Written by a mask of positions, true for the last rows or, `first`, for all others."""

    def program(write: Writer, x: Node) -> Node:
        slots, positions = write.inputs["slots"], write.inputs["positions"]
        nobodys = number(write, slots)
        place = write(aten.where.self, last(write, positions), *((nobodys, slots) if first else (slots, nobodys)))
        column = write(aten.remainder.Scalar, positions, WINDOW)
        write(aten.index_put_.default, write.inputs["ring"], [place, column], x)
        return x

    return program


def compared(op: Any, behind: int) -> Numbers:
    return lambda write, positions: write(op, positions, write(aten.sub.Tensor, write.inputs["stops"], behind))


def denied(op: Any) -> Numbers:
    return lambda write, positions: write(op, compared(aten.lt.Tensor, WINDOW)(write, positions))


KEPT = compared(aten.ge.Tensor, WINDOW)
PROGRAMS: dict[Any, Program] = {
    aten.add.Tensor: before(aten.add.Tensor, -2),
    aten.add.Scalar: before(aten.add.Scalar, -2),
    aten.sub.Tensor: before(aten.sub.Tensor, 2),
    aten.sub.Scalar: before(aten.sub.Scalar, 2),
    aten.clamp_min.default: no_less(aten.clamp_min.default, lambda write: 0),
    aten.clamp_min.Tensor: no_less(aten.clamp_min.Tensor, lambda write: whole(write, 0)),
    aten.maximum.default: no_less(aten.maximum.default, lambda write: whole(write, 0)),
    aten.relu.default: by_number(lambda write, row: write(aten.relu.default, write(aten.sub.Tensor, row, 2))),
    aten.clamp_max.default: by_number(
        lambda write, row: write(aten.clamp_max.default, row, write(operator.sub, count(write), 1))
    ),
    aten.div.Tensor_mode: picks(lambda write, order: write(aten.div.Tensor_mode, order, WIDTH, rounding_mode="floor")),
    aten.ge.Tensor: ring(KEPT),
    aten.gt.Tensor: ring(compared(aten.gt.Tensor, WINDOW + 1)),
    aten.lt.Tensor: ring(compared(aten.lt.Tensor, WINDOW), first=True),
    aten.le.Tensor: ring(compared(aten.le.Tensor, WINDOW + 1), first=True),
    aten.eq.Tensor: ring(compared(aten.eq.Tensor, 1)),
    aten.ne.Tensor: ring(compared(aten.ne.Tensor, 1), first=True),
    aten.bitwise_not.default: ring(denied(aten.bitwise_not.default)),
    aten.logical_not.default: ring(denied(aten.logical_not.default)),
    aten.where.self: ring(KEPT),
    aten.full.default: ring(KEPT, lambda write, _: write(aten.full.default, [], SLOTS, dtype=torch.int64)),
    aten.scalar_tensor.default: ring(KEPT),
    aten.view.default: moved(aten.view.default, [-1, 1]),
    aten._unsafe_view.default: moved(aten._unsafe_view.default, [-1, 1]),
    aten.unsqueeze.default: moved(aten.unsqueeze.default, 1),
    aten.squeeze.default: moved_column(aten.squeeze.default),
    aten.squeeze.dim: moved_column(aten.squeeze.dim, 1),
    aten.squeeze.dims: moved_column(aten.squeeze.dims, [1]),
    aten.expand.default: moved_column(aten.expand.default, [-1, 3]),
    aten.clone.default: moved(aten.clone.default),
    aten.alias.default: moved(aten.alias.default),
    aten.detach.default: moved(aten.detach.default),
    prims.convert_element_type.default: moved(prims.convert_element_type.default, torch.int32),
}


def test_every_meaning_has_a_program() -> None:
    assert PROGRAMS.keys() == MEANINGS.keys()


@pytest.mark.parametrize("op", PROGRAMS, ids=str)
def test_without_its_meaning_all_rows_are_read(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not demanded_of(PROGRAMS[op])[0].every
    monkeypatch.delitem(MEANINGS, op)
    assert demanded_of(PROGRAMS[op])[0] == EVERY


def test_offsets_of_keys_are_known_along_the_last_dimension_alone() -> None:
    """Seen otherwise a mask of keys says nothing, and a position is still one, of no known offsets."""
    write = Writer()
    keys = write(aten.unsqueeze.default, write.inputs["positions"], 1)
    keys = write(aten.expand.default, keys, [-1, WINDOW])
    column = write(aten.unsqueeze.default, keys, 2)
    same, other = (MEANINGS[node.target] for node in (keys, column))
    offsets = tuple(range(1 - WINDOW, 1))
    mask, position = (Meaning(of, offsets=offsets) for of in ("in step", "position"))
    assert (same(keys, (mask,)), same(keys, (position,))) == (mask, position)
    assert (other(column, (mask,)), other(column, (position,))) == (None, Meaning("position"))
