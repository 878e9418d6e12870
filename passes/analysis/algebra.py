"""algebra: sizes as sympy has them: natural numbers with the names of their symbols, to multiply, compare and fill in.

    f32[u0, 4*u11]   ->   (u0, 4*u11)      64*u0*u11 bytes      at u0=2, u11=8: 1024
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import sympy  # type: ignore[import-untyped]
from torch import SymInt
from torch.fx import Node

from v41._compat import as_python
from v41.passes.matching import shape

Expr: TypeAlias = sympy.Expr
ONE, ZERO = sympy.Integer(1), sympy.Integer(0)


def expression(size: int | SymInt) -> Expr:
    """A size, or a number made of sizes."""
    return _integer(size) if isinstance(size, int) else _expression(as_python(size))


def sizes(node: Node) -> tuple[Expr, ...]:
    """The shape of the tensor `node` stands for."""
    return tuple(map(expression, shape(node)))


def product(factors: tuple[Expr, ...]) -> Expr:
    """Of all sizes in a shape: how many elements it has."""
    return _product(factors)


def multiple(size: Expr, unit: Expr) -> bool:
    """Whether `size` is known to be a whole number of `unit`, whatever the symbols are."""
    return size == unit or (unit != 0 and (size / unit).is_integer is True)


@cache
def _integer(size: int) -> Expr:
    return sympy.Integer(size)


@cache
def _product(factors: tuple[Expr, ...]) -> Expr:
    return sympy.Mul(*factors)


@cache
def _expression(text: str) -> Expr:
    code = compile(text, "<size>", "eval")
    known = {"math": sympy, "max": sympy.Max, "min": sympy.Min}
    symbols = {name: sympy.Symbol(name, integer=True, nonnegative=True) for name in code.co_names if name not in known}
    return sympy.sympify(eval(code, known, symbols))
