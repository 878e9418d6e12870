"""algebra: what is known of sizes whatever their symbols are, and what torch says of them is said again."""

from __future__ import annotations

import torch
from sympy import Symbol

from tests.strategies.small import calls_of, fakes, graph_of, inputs_of
from v41.passes.analysis.algebra import ONE, expression, multiple, product, sizes

T, R, Q = (Symbol(name, integer=True, nonnegative=True) for name in "TRQ")


def test_a_multiple_is_one_for_every_number() -> None:
    always = (T * 8, T), (T * 8, expression(4)), (T, T), (expression(8), ONE), (expression(0), expression(0))
    assert [multiple(*each) for each in always] == [True] * 5
    not_always = (T, T * 8), (T * R, Q), (T + 4, expression(4)), (T, expression(0)), (expression(8), expression(3))
    assert [multiple(*each) for each in not_always] == [False] * 5
    assert product((T, expression(2), T)) == 2 * T**2 and product(()) == 1


def test_sizes_are_symbols_of_whole_numbers_and_what_is_made_of_them() -> None:
    with fakes() as new:
        a, b = new.size(), new.size()
        gm = graph_of(lambda x, y: torch.cat([x, y]).repeat(2, 1), new(a, 4), new(b, 4))
        less, more = expression(torch.sym_min(a, b // 2)), expression(torch.sym_max(a, b // 2))
    (rows, width), (others, _) = map(sizes, inputs_of(gm))
    assert isinstance(rows, Symbol) and rows.is_integer and rows.is_nonnegative and width == 4
    assert [str(rows), str(others)] == [str(a), str(b)]
    assert sizes(calls_of(gm, "repeat")[-1]) == (2 * (rows + others), 4)
    assert [less.subs({rows: 6, others: count}) for count in (5, 30)] == [2, 6]
    assert [more.subs({rows: 6, others: count}) for count in (5, 30)] == [6, 15]
