"""engram_tables: where the Engram tables of a model lie; host_tables.py says what each costs.

mapped      left mapped from the checkpoint's file, or where random ones were made
resident    in the host's memory; the host looks up
pinned      there too, and the GPU looks up
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from v41.model_def.engram import EngramTable
from v41.runtime.host_tables import in_memory, on_device

PLACES = ("mapped", "resident", "pinned")


@torch.no_grad()
def place_tables(model: nn.Module, place: str, device: torch.device | str) -> int:
    """Moves the tables of `model` to `place`; bytes that the host now holds for them. TableNotHeld where it cannot."""
    assert place in PLACES, place
    held = 0
    for module in model.modules():
        if isinstance(module, EngramTable) and place != "mapped":
            for name, table in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(_placed(table.data, place, device), requires_grad=False))
                held += table.nbytes
    return held


def _placed(table: Tensor, place: str, device: torch.device | str) -> Tensor:
    resident = in_memory(table.cpu())
    return on_device(resident, device) if place == "pinned" else resident
