"""drawn_model: a model with random weights for tools that run one: the same in every run, and no call trains it."""

from __future__ import annotations

import os
from itertools import chain

import torch

from v41.errors import ModelBeyondMemory
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM

GIB = 2**30


def drawn_model(config: V41Config, device: str, where: str) -> V41ForCausalLM:
    """On `device`. ModelBeyondMemory, said of `where`, before the system would kill a process that draws on a CPU what
    its memory does not hold; a GPU says so itself."""
    if device == "cpu" and (needed := weight_bytes(config)) > (there := memory_of_host()):
        raise ModelBeyondMemory(where, needed=needed / GIB, there=there / GIB)
    return V41ForCausalLM.random(config, 0, device).eval().requires_grad_(False)


def weight_bytes(config: V41Config) -> int:
    """Of all parameters and buffers, Engram's tables among them."""
    with torch.device("meta"):
        model = V41ForCausalLM(config)
    return sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))


def memory_of_host() -> int:
    """Bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
