"""index: where in a tensor an element lies, as sums of lanes, so that views are arithmetic.

    [512] viewed as [16, 32]     element (g, i) is at 32 g + i; the other way, c is at (c // 32, c % 32)

A lane is an axis of the kernel's tiles, so many elements long. Divisions come out even where the terms tell it; where
a lane must be cut for that, NeedsSplit asks for it and the body is read again. What no cut makes even stays a Digit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from v41.lowering.rowwise.expr import Expr


@dataclass(frozen=True, order=True)
class Lane:
    """Number `number` of the lanes with `size` elements."""

    size: int
    number: int
    low = 0

    @property
    def padded(self) -> int:
        return 1 << (self.size - 1).bit_length()

    @property
    def name(self) -> str:
        return f"lane_{self.size}" + (f"_{self.number}" if self.number else "")


@dataclass(frozen=True, order=True)
class Along(Lane):
    """An axis of a product, walked block by block: number 0 what is summed, number 1 the columns of the result."""

    @property
    def padded(self) -> int:
        return 1

    @property
    def name(self) -> str:
        return ("depth", "column")[self.number]


@dataclass(frozen=True, order=True)
class Part(Lane):
    """An axis of all results of which a program has one element: no axis of its tiles."""

    @property
    def padded(self) -> int:
        return 1

    @property
    def name(self) -> str:
        return "part"


@dataclass(frozen=True, repr=False)
class Taken:
    """An index that the kernel computes, below `size`."""

    expr: Expr
    size: int
    low = 0

    def __repr__(self) -> str:
        return f"taken {id(self.expr)} of {self.size}"


@dataclass(frozen=True)
class Digit:
    """inner // by; with a `limit`, brought within 0..limit-1."""

    inner: Index
    by: int
    limit: int = 0

    @property
    def low(self) -> int:
        return 0 if self.limit else self.inner.lowest // self.by

    @property
    def size(self) -> int:
        return self.limit or self.inner.highest // self.by + 1


Atom = Lane | Taken | Digit


@dataclass(frozen=True)
class Index:
    """The sum of `terms`, (factor, atom) each, and `const`."""

    terms: tuple[tuple[int, Atom], ...] = ()
    const: int = 0

    @property
    def lowest(self) -> int:
        return self.const + sum(factor * (atom.low if factor > 0 else atom.size - 1) for factor, atom in self.terms)

    @property
    def highest(self) -> int:
        return self.const + sum(factor * (atom.size - 1 if factor > 0 else atom.low) for factor, atom in self.terms)

    @property
    def number(self) -> int | None:
        """The index itself, if it is one number."""
        return None if self.terms else self.const

    def lanes(self) -> frozenset[Lane]:
        found: set[Lane] = set()
        for _, atom in self.terms:
            if isinstance(atom, Lane):
                found.add(atom)
            else:
                found |= atom.inner.lanes() if isinstance(atom, Digit) else atom.expr.lanes
        return frozenset(found)

    def taken(self) -> list[Expr]:
        """Computed indices inside, in order."""
        found: list[Expr] = []
        for _, atom in self.terms:
            if isinstance(atom, Taken):
                found.append(atom.expr)
            elif isinstance(atom, Digit):
                found += atom.inner.taken()
        return found

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.const + other)
        factors: dict[Atom, int] = {}
        for factor, atom in (*self.terms, *other.terms):
            factors[atom] = factors.get(atom, 0) + factor
        return Index(tuple((factor, atom) for atom, factor in factors.items() if factor), self.const + other.const)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        return Index(tuple((each * factor, atom) for each, atom in self.terms), self.const * factor)


class NeedsSplit(Exception):
    """Lanes of `size` should be (size // inner, inner)."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__(size, inner)
        self.size, self.inner = size, inner
        self.tables: list[object] = []  # what was read when it was asked for, the innermost first


def at(number: int) -> Index:
    return Index((), number)


def total(indices: Iterable[Index]) -> Index:
    found = Index()
    for index in indices:
        found = found + index
    return found


def divide(x: Index, by: int) -> Index:
    """x // by."""
    if by == 1:
        return x
    even = Index(tuple((f // by, atom) for f, atom in x.terms if f % by == 0), x.const // by)
    rest = Index(tuple((f, atom) for f, atom in x.terms if f % by), x.const % by)
    if rest.lowest >= 0 and rest.highest < by:
        return even
    for factor, atom in rest.terms:  # a lane whose upper part counts in units of `by`
        below = Index(tuple(term for term in rest.terms if term[1] is not atom), rest.const)
        inner = by // factor if factor > 0 else 0
        fits = inner and by % factor == 0 and below.lowest >= 0 and below.highest < factor
        if fits and type(atom) is Lane and atom.size % inner == 0:
            raise NeedsSplit(atom.size, inner)
    return even + Index(((1, Digit(rest, by)),))


def remainder(x: Index, by: int) -> Index:
    """x % by."""
    return x + divide(x, by) * -by


def may_leave(x: Index, size: int) -> bool:
    """Whether `x` may lie outside of 0..size-1."""
    return x.lowest < 0 or x.highest >= size
