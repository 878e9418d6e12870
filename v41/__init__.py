"""v41: DeepSeek-V4.1-Flash's serving schedule, derived from its plain PyTorch definition.

torch.compile(model, backend="v41") is the way in; `v41.collect()` gathers the reports of what was compiled, and
`v41.past_guards` calls a compiled model with little time on the host. Importing this package imports neither the
compiler nor a kernel.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from v41.report import collect as collect
    from v41.runtime.past_guards import past_guards as past_guards

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "collect":
        from v41.report import collect

        return collect
    if name == "past_guards":
        from v41.runtime.past_guards import past_guards

        return past_guards
    raise AttributeError(f"module 'v41' has no attribute {name!r}")
