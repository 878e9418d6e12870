"""nearest: what somebody who mistyped a name may have meant, and what else there is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LISTED = 20  # names that an answer lists


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name most like `name`; None where none is. Case does not count."""
    by_lower = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), by_lower, 1, 0.6)
    return by_lower[found[0]] if found else None


def choices(name: str, known: Iterable[str]) -> str:
    """What an error says there is: "outline_mhc, the nearest; all: canonicalize, ..."."""
    names = list(known)
    near = nearest(name, names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    listed = ", ".join(names[:LISTED]) + more
    return f"{near}, the nearest; all: {listed}" if near is not None else listed
