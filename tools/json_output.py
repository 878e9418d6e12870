"""json_output: facts for other programs, under the name and version of their layout.

{"schema": "v41.cost.1", ...}        a field that goes, or means something else, makes it "v41.cost.2"
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

VERSIONS = {  # of what each command prints, or bench writes, and of the files of a saved run
    **dict.fromkeys(("inspect", "passes", "why-not", "diff", "generate", "completion", "bench"), 1),
    **dict.fromkeys(("capture", "explain", "partition", "memory", "kernels", "verify", "bisect", "timeline"), 1),
    **{"cost": 2, "run": 4},
}


def schema(name: str) -> str:
    return f"v41.{name}.{VERSIONS[name]}"


def print_json(name: str, facts: Mapping[str, Any]) -> None:
    """Writes `facts` of command `name` to stdout."""
    print(json.dumps({"schema": schema(name), **facts}, indent=1))
