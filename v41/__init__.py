"""v41: DeepSeek-V4.1-Flash's serving schedule, derived from its plain PyTorch definition.

torch.compile(model, backend="v41") is the way in; `v41.collect()` gathers the reports of what was compiled,
`v41.last_report()` has the last of them, `v41.explain(model, *inputs)` tells what would be compiled, and
`v41.past_guards` calls a compiled model with little time on the host. Importing this package imports neither the
compiler nor a kernel.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from v41.report import collect as collect
    from v41.report import last_report as last_report
    from v41.runtime.past_guards import past_guards as past_guards
    from v41.tools.explanation import explain as explain

__version__ = "0.1.0"

HOMES = {  # what is imported when it is asked for -> from where
    "collect": "v41.report",
    "last_report": "v41.report",
    "past_guards": "v41.runtime.past_guards",
    "explain": "v41.tools.explanation",
}


def __getattr__(name: str) -> object:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'v41' has no attribute {name!r}")
