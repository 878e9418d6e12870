"""Models as their files hold them: a quantised one in a folder, and whether two models hold the same bits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from v41.model_def.checkpoint import WEIGHTS, save_checkpoint
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM

QUANTISED = V41Config.preset("tiny").replace(weight_dtype="fp8", expert_dtype="fp4")


def written(folder: Path, config: V41Config = QUANTISED) -> dict[str, Tensor]:
    """Writes a random model there; its tensors, to be changed and written again."""
    torch.manual_seed(0)
    save_checkpoint(V41ForCausalLM(config), folder)
    return load_file(folder / WEIGHTS)


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_bytes = lambda t: t.detach().contiguous().view(torch.uint8)
    return a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def same_model(a: V41ForCausalLM, b: V41ForCausalLM) -> bool:
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    return ours.keys() == theirs.keys() and all(
        p.dtype == theirs[name].dtype and same_bits(p, theirs[name]) for name, p in ours.items()
    )
