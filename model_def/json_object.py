"""parse_object: the object that a JSON text holds. What a reader may take in two ways, or not at all, is refused.

    taken      {"a": 1}
    refused    {"a": 1, "a": 2}    [1]    [[[[... a thousand deep    no JSON    no text

The error says why, and knows no file: whoever read one names it.
"""

from __future__ import annotations

import json
from typing import Any


def parse_object(text: str | bytes) -> dict[str, Any]:
    """ValueError where `text` is no JSON, is nested too deep to be read, holds no object, or one with a name twice."""
    try:
        data = json.loads(text, object_pairs_hook=of_single_names)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, no object")
    return data


def of_single_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The standard reader would keep the last of two values under one name."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the name {twice} stands twice in one object")
    return made
