"""Tensor parallelism: every rank runs the whole forward, with its share of the heads and of each expert's channels.

    attention   heads / n, output groups / n      wq_b, wo_a by rows, wo_b by columns       y = sum over ranks of y_rank
    experts     inner channels / n                w1, w3 by rows, w2 by columns             y = sum over ranks of y_rank
    embedding   channels / n                      by columns                                rows side by side
    head        vocabulary / n                    by rows                                   logits side by side

A rank is a model of fewer heads and thinner experts. Each rounds what its sublayers return to bf16, as every linear
does, and all-reduce adds that up. All else is small or shared by all heads (latents, caches, indexers, gates, Engram)
and runs on every rank alike, with equal bits: so all ranks pick the same entries and experts. Index heads could be
shared too, but their scores would have to be added up, one number a row and entry of its context. Alone, nothing is
added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from v41.model_def.config import V41Config
from v41.model_def.errors import NoSuchRank, RankAlone, ShareNotWhole
from v41.model_def.quantization import GROUP

# the last two in the embedding and in the head alone
DIVIDED = ("num_attention_heads", "o_groups", "moe_intermediate_size", "hidden_size", "vocab_size")
AN_EXPERT = r".*\.ffn\.(experts\.\d+|shared_experts)"
SPLIT = (  # dimension -> released names of what is split along it, with their scales
    (0, rf"head\.weight|.*\.attn\.(attn_sink|(wq_b|wo_a)\.(weight|scale))|{AN_EXPERT}\.w[13]\.(weight|scale)"),
    (1, rf"embed\.weight|(.*\.attn\.wo_b|{AN_EXPERT}\.w2)\.(weight|scale)"),
)


@dataclass(frozen=True)
class Share:
    """What one rank of `world` holds. `group` is the name of the process group that adds up; None where one is all, or
    where a model is only loaded and does not run."""

    rank: int = 0
    world: int = 1
    group: str | None = None

    def __post_init__(self) -> None:
        counted = type(self.rank) is int and type(self.world) is int
        if not counted or not 0 <= self.rank < self.world:
            raise NoSuchRank("Share", rank=self.rank, world=self.world)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Share:
        """This process's share among those of `group`: of all, torch.distributed.group.WORLD."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group.group_name)

    def of_config(self, config: V41Config) -> V41Config:
        """The sizes of this rank's sublayers. ShareNotWhole where they do not divide, or groups under one scale do."""
        left = {name: getattr(config, name) for name in DIVIDED if getattr(config, name) % self.world}
        for name, size in in_groups(config).items():
            if size % (GROUP * self.world) and not any(part in left for part in name.split(" * ")):
                left[f"{name} in groups of {GROUP}"] = size
        if left:
            raise ShareNotWhole("V41ForCausalLM(share=...)", world=self.world, sizes=left)
        heads, groups, inner, *_ = (getattr(config, name) // self.world for name in DIVIDED)
        return config.replace(num_attention_heads=heads, o_groups=groups, moe_intermediate_size=inner)

    def check_joined(self, where: str) -> None:
        """RankAlone where others hold the rest of the model and there is no group to meet them in."""
        if self.world > 1 and self.group is None:
            raise RankAlone(where, rank=self.rank, world=self.world)

    def of_vocabulary(self, config: V41Config) -> int:
        return config.vocab_size // self.world

    def of_channels(self, config: V41Config) -> int:
        return config.hidden_size // self.world


WHOLE = Share()


def in_groups(config: V41Config) -> dict[str, int]:
    """Sizes that ranks share and that scales divide into groups: none of a model in bf16. Heads are whole groups."""
    sizes = {"moe_intermediate_size": config.moe_intermediate_size} if config.expert_dtype == "fp4" else {}
    if config.weight_dtype == "fp8":
        sizes["moe_intermediate_size"] = config.moe_intermediate_size
        sizes["o_groups * o_lora_rank"] = config.o_groups * config.o_lora_rank
    return sizes


def split_dimension(name: str) -> int | None:
    """The dimension of a released tensor that ranks share; None where each has it all."""
    return next((dim for dim, names in SPLIT if re.fullmatch(names, name)), None)


def summed(y: Tensor, share: Share) -> Tensor:
    """The sum of all ranks' y."""
    if share.group is None:
        return y
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(y, "sum", share.group))


def side_by_side(columns: Tensor, share: Share) -> Tensor:
    """[rows, n / world] of each rank -> [rows, n]. Nothing is added: every bit is that of the rank that holds it."""
    if share.group is None:
        return columns
    functional = torch.ops._c10d_functional
    parts = functional.wait_tensor(functional.all_gather_into_tensor(columns, share.world, share.group))
    return parts.unflatten(0, (share.world, -1)).transpose(0, 1).flatten(1)
