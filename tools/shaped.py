"""shaped: whether values read from a file have the types that their dataclass declares, all the way down.

    check(LaunchFacts(rows="1", ...))      TypeError: LaunchFacts.rows is no int: '1'

What reads a run relies on these types; so a damaged file is refused where it is read, and not met later. Fields that
do not take part in comparisons are no data, and are left alone.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

Test = Callable[[Any], bool]


def check(value: Any) -> None:
    """TypeError names the first field of the dataclass `value` that is not what it declares."""
    kind: Any = type(value)
    for owner, name, fits in _fields(kind):
        found = getattr(value, name)
        if not fits(found):
            raise TypeError(f"{owner}.{name} is not what it should be: {str(found)[:60]!r}")


@cache
def _fields(kind: type) -> tuple[tuple[str, str, Test], ...]:
    hints = get_type_hints(kind)
    return tuple((kind.__name__, each.name, test(hints[each.name])) for each in fields(kind) if each.compare)


@cache
def test(hint: Any) -> Test:
    """What tells whether a value is one of `hint`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        tests = tuple(map(test, inner))
        return lambda value: any(each(value) for each in tests)
    if origin is tuple and inner[-1] is not ...:
        tests = tuple(map(test, inner))
        return lambda value: type(value) is tuple and len(value) == len(tests) and all(
            each(one) for each, one in zip(tests, value, strict=True))  # fmt: skip
    if origin in (tuple, list):
        of = test(inner[0])
        return lambda value: type(value) is origin and all(map(of, value))
    if origin in (dict, Mapping):
        of_key, of_value = map(test, inner)
        return lambda value: isinstance(value, dict) and all(map(of_key, value)) and all(map(of_value, value.values()))
    if is_dataclass(hint):
        parts = lambda: _fields(hint)  # type: ignore[arg-type]  # asked for later: a plan may hold plans
        return lambda value: type(value) is hint and all(fits(getattr(value, name)) for _, name, fits in parts())
    if hint is float:
        return lambda value: type(value) is int or (type(value) is float and math.isfinite(value))
    if hint in (int, str, bool, types.NoneType):
        return lambda value: type(value) is hint
    return lambda value: True  # Any, object
