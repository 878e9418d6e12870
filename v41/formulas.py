"""formulas: sizes and bytes as texts over symbols, worked out for numbers without running them as Python.

    evaluate("5120*u0 + min(384, 6*u0)", {"u0": 16})    82016

What sympy and torch print is what is read: + - * / // % **, min, max, floor, ceiling and round, in either's spelling.
Texts come from files, hence no eval.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

Number = int | Fraction
MOST_BITS = 512  # of what is raised to a power


def _no_formula(text: str) -> Number:
    raise ValueError(f"no formula: {text!r}")


def _power(a: Number, b: Number) -> Number:
    """Of what sizes come to; a power of powers of powers would take for ever."""
    small = b in range(9) and max(abs(a.numerator), a.denominator).bit_length() <= MOST_BITS
    return a ** int(b) if small else _no_formula(f"{a}**{b}")


OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: Fraction(a) / b,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: _power(a, b),
    ast.USub: operator.neg,
}
CALLS: dict[str, Callable[..., Any]] = {
    **{"min": min, "max": max, "Min": min, "Max": max, "Mod": operator.mod},
    **{"floor": math.floor, "ceil": math.ceil, "ceiling": math.ceil, "trunc": math.trunc},
    **{"FloorDiv": operator.floordiv, "CeilDiv": lambda a, b: -(-a // b), "PythonMod": operator.mod},
    **{"IntTrueDiv": OPERATIONS[ast.Div], "FloatTrueDiv": OPERATIONS[ast.Div], "ToFloat": lambda a: a, "Abs": abs},
    **{"FloorToInt": math.floor, "CeilToInt": math.ceil, "TruncToInt": math.trunc, "RoundToInt": round},
}


def evaluate(text: str, symbols: Mapping[str, int]) -> int:
    """The number, rounded up. KeyError for a symbol without a value, ValueError for what is no formula."""
    try:
        return math.ceil(_value(_parsed(text), symbols))
    except (TypeError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"no formula: {text[:60]!r}") from error


def symbols_in(text: str) -> frozenset[str]:
    """Names of what a formula needs values of."""
    calls = {node.func for node in ast.walk(_parsed(text)) if isinstance(node, ast.Call)}
    modules = {node.value for node in ast.walk(_parsed(text)) if isinstance(node, ast.Attribute)}
    names = (node for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name))
    return frozenset(node.id for node in names if node not in calls and node not in modules)


@cache
def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:  # the parser says so of what is nested too deeply
        raise ValueError(f"no formula: {text[:60]!r}") from error


def _value(node: ast.AST, symbols: Mapping[str, int]) -> Number:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            return symbols[name]
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATIONS[type(op)](_value(operand, symbols))
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATIONS[type(op)](_value(left, symbols), _value(right, symbols))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if name in CALLS:
            return CALLS[name](*(_value(each, symbols) for each in arguments))
    return _no_formula(ast.unparse(node))
