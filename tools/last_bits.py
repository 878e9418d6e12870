"""last_bits: how far the logits of a model move where last bits alone change. It is what a compiled run may do.

    eager     writes (record)
    exact     every operation in fp64, rounded where the model rounds (exact.py)      reads the same (replay)
    nudged    every fp32 sum one unit in the last place up or down, by a seed         likewise, NUDGED times

One such run is one draw: in some rows it flips no FP8 value and no pick, though another would. So a row is judged by
the run that moved it most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from v41._compat import OpOverload, TorchDispatchMode
from v41.model_def.generation import sampling
from v41.model_def.model import V41ForCausalLM
from v41.tools.exact import SUMS, Exact
from v41.tools.recording import Recording, record, replay

NUDGED = 2


class Nudged(TorchDispatchMode):
    """`with Nudged(seed): model(batch, cache)`: fp32 sums are a unit in the last place off, up or down by chance."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.generators = seed, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in SUMS or not isinstance(result, Tensor) or result.dtype is not torch.float32:
            return result
        where = result.device
        if where not in self.generators:
            self.generators[where] = torch.Generator(where).manual_seed(self.seed)
        up = torch.rand(result.shape, generator=self.generators[where], device=where) < 0.5
        return torch.nextafter(result, torch.where(up, torch.inf, -torch.inf).to(result.dtype))


def reference(
    model: V41ForCausalLM,
    prompts: list[list[int]],
    seed: int,
    settings: dict[str, Any],
    tick: Callable[[], None] = lambda: None,
) -> tuple[Recording, Tensor]:
    """What eager writes with tokens drawn by `seed`; the logits of the others over the same, [1 + NUDGED, N, V]: the
    exact run first. tick: is called after every step of each of these runs."""
    device = settings["device"]
    choose = sampling(1.0, torch.Generator(device).manual_seed(seed))
    eager = record(model, model.config, prompts, **settings, choose=choose, progress=tick)
    logits = []
    for mode in (Exact(), *map(Nudged, range(NUDGED))):
        with mode:
            logits.append(replay(model, model.config, eager, device, tick))
    return eager, torch.stack(logits)
