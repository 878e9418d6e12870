"""Fills one module of the model from tensors with released names, without the loader that other tests prove."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@torch.no_grad()
def filled(module: AnyModule, weights: Mapping[str, Tensor], prefix: str) -> AnyModule:
    """`module` with the weights `prefix` + its parameter names; stacked experts are gathered one by one."""
    for name, parameter in module.named_parameters():
        head, _, tail = name.partition("experts.")
        if head in ("", "ffn.") and tail and not name.startswith("shared"):
            parts = [weights[f"{prefix}{head}experts.{e}.{tail}"] for e in range(parameter.shape[0])]
            stored = torch.stack([part.view(parameter.dtype) for part in parts])
        else:
            stored = weights[prefix + name].view(parameter.dtype)
        assert stored.shape == parameter.shape, (prefix + name, stored.shape, parameter.shape)
        parameter.copy_(stored)
    return module
