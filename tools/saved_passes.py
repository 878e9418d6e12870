"""saved_passes: what passes did, from the values that report_view.as_json made of it.

Values are judged as they are read: KeyError, TypeError or ValueError where that cannot have written them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from v41.regions import Region
from v41.report import Change, Decision, PassRun


def run_from(values: dict[str, Any]) -> PassRun:
    """What report_view.pass_values said. KeyError, TypeError or ValueError where it cannot have."""
    told = {field.name: values[field.name] for field in fields(PassRun) if field.repr}
    told["made"] = {_text(name): int(count) for name, count in told["made"].items()}
    told["decisions"] = [decision_from(each) for each in told["decisions"]]
    if "changes" in values:
        told["changes"] = [_made(Change, each) for each in values["changes"]]
    for name in ("nodes", "regions", "launches"):
        for end in ("before", "after"):
            told[f"{name}_{end}"] = int(told[f"{name}_{end}"])
    return PassRun(**told | {"name": _text(told["name"]), "milliseconds": float(told["milliseconds"])})


def decision_from(values: dict[str, Any]) -> Decision:
    region = values["region"] and Region(_text(values["region"]["kind"]), dict(values["region"]["attrs"]))
    times = values.get("times")
    times = times and {str(name): {int(rows): float(us) for rows, us in each.items()} for name, each in times.items()}
    body = values.get("body", "")  # older files do not say it
    made: Decision = _made(Decision, values | {"region": region, "times": times, "body": body})
    if not isinstance(made.applied, bool):
        raise TypeError(f"applied is {made.applied!r}")
    _text(made.source)
    _text(made.body)
    return made


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """A frozen dataclass from all its fields, its node a text."""
    made = kind(**{field.name: values[field.name] for field in fields(kind)})
    _text(made.node)
    return made


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is {value!r}")
    return value
