"""nearest: what somebody who mistyped a name may have meant, and what else there is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LISTED, FEW = 20, 8  # names that an answer lists: all of so many, or of more those like the one that was typed


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name most like `name`; None where none is. Case does not count."""
    by_lower = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), by_lower, 1, 0.6)
    return by_lower[found[0]] if found else None


def some_of(names: list[str]) -> str:
    """The first of many names of which none is like the one that was typed."""
    return f"{', '.join(names[:FEW])} and {len(names) - FEW} more"


def choices(name: str, known: Iterable[str]) -> str:
    """What an error says there is: "outline_mhc, the nearest; all: canonicalize, ..."; of many names those like it."""
    names = list(dict.fromkeys(known))  # a body that is called twice has sites of one name
    near = nearest(name, names)
    if len(names) > LISTED:
        like = get_close_matches(name, names, FEW, 0.4)
        listed = f"{', '.join(like)} and {len(names) - len(like)} more" if like else some_of(names)
        return f"{near}, the nearest; like it: {listed}" if near is not None else listed
    listed = ", ".join(names)
    return f"{near}, the nearest; all: {listed}" if near is not None else listed
