"""A formula is worth what sympy says it is, whichever of the two printers wrote it, and nothing else is run."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy import functions

from v41.formulas import evaluate, symbols_in

A, B = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("u0", "u11"))
LEAVES = st.one_of(st.sampled_from([A, B]), st.integers(1, 5000).map(sympy.Integer))
PAIRS = [sympy.Add, sympy.Mul, sympy.Max, sympy.Min, lambda a, b: sympy.floor(a / (b + 1)), lambda a, b: a * a + b]
FORMULAS = st.recursive(
    LEAVES, lambda inner: st.tuples(st.sampled_from(PAIRS), inner, inner).map(lambda it: it[0](*it[1:])), max_leaves=8
)


@given(FORMULAS, st.integers(0, 9000), st.integers(0, 9000))
def test_a_formula_is_worth_what_sympy_says(formula: sympy.Expr, rows: int, blocks: int) -> None:
    wanted = int(sympy.ceiling(formula.subs({A: rows, B: blocks})))
    assert evaluate(str(formula), {"u0": rows, "u11": blocks}) == wanted
    assert symbols_in(str(formula)) == {str(symbol) for symbol in formula.free_symbols}


@pytest.mark.parametrize(
    ("text", "worth"),
    [("40960*u0", 122880), ("max(2, u0) // 2", 1), ("math.ceil(u0 / 2)", 2), ("-u0 + 10 % 4", -1), ("u0**2", 9)],
)
def test_what_torch_prints_is_read(text: str, worth: int) -> None:
    assert evaluate(text, {"u0": 3}) == worth


@pytest.mark.parametrize("whole", ["CeilToInt", "FloorToInt", "TruncToInt", "RoundToInt"])
def test_sizes_that_were_divided_are_read_as_torch_prints_them(whole: str) -> None:
    made = getattr(functions, whole)
    for formula in (made(functions.IntTrueDiv(A, 2)), made(functions.FloatTrueDiv(functions.ToFloat(A) - 9, 4))):
        for rows in range(20):
            assert evaluate(str(formula), {"u0": rows}) == formula.subs({A: rows})


DEEP = ["(" * 999 + "1" + ")" * 999, "1" + "+1" * 20_000, "-" * 100_000 + "1"]
NONE = ["open('x')", "u0.real", "[1]", "1 if u0 else 2", "u0 +", "'8'", "u0 / 0", "1.5", "9**9**9", "2**-1"]


@pytest.mark.parametrize("text", NONE + DEEP)
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no formula"):
        evaluate(text, {"u0": 3})


def test_a_symbol_without_a_number_is_named() -> None:
    with pytest.raises(KeyError, match="u4"):
        evaluate("u0 + u4", {"u0": 3})
