"""Counts: how many weights a model has, and how many of them a token meets. Read from the modules, on any device.

    backbone        all but Engram's tables
    decode          what one token of a decode step meets: of the routed experts its top-k; of tables and embedding rows
                    alone, which count as none
    prefill         the same of a prompt's token that takes part in the encoder only, as bounded replay has nearly all:
                    layers before the last KV source, no head (of that layer it meets the projection of its entry, too)

A packed pair is two weights; scales are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from v41.model_def.engram import EngramTable
from v41.model_def.model import Embedding, V41ForCausalLM
from v41.model_def.moe import Experts, Fp4ExpertLinear


@dataclass(frozen=True)
class Counts:
    backbone: int
    engram_tables: int
    decode: int
    prefill: int


def count(model: V41ForCausalLM) -> Counts:
    tables = sum(weights(module) for module in model.modules() if isinstance(module, EngramTable))
    encoder = list(model.layers)[: model.config.last_kv_source]
    return Counts(weights(model) - tables, tables, met([model], model.config.num_experts_per_tok),
                  met(encoder, model.config.num_experts_per_tok))  # fmt: skip


def weights(module: nn.Module) -> int:
    """All weights below `module`."""
    return sum(
        parameter.numel() * (2 if isinstance(part, Fp4ExpertLinear) else 1)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if name != "scale"
    )


def met(modules: Sequence[nn.Module], picks: int) -> int:
    """The weights below `modules` that one token meets, with `picks` experts of each layer."""
    parts = [part for module in modules for part in module.modules()]
    idle = sum(weights(part) for part in parts if isinstance(part, EngramTable | Embedding))
    for part in parts:
        if isinstance(part, Experts):
            experts = part.w1.weight.shape[0]
            idle += weights(part) // experts * (experts - picks)
    return sum(map(weights, modules)) - idle
