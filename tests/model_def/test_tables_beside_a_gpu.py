"""Engram's tables stay in the host's memory beside a model on another device, and a look-up goes there and comes back.

Where there is no GPU, the meta device shows what is put where, and fake tensors of a GPU what meets what: they refuse
an operation on two devices, as a GPU would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tests.model_def.rows import QUICK
from v41.model_def.batch import Batch, Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.checkpoint import save_checkpoint
from v41.model_def.engram import Engram, EngramTable
from v41.model_def.model import V41ForCausalLM
from v41.tools.compare import KL_LIMIT

CONFIG = QUICK.replace(weight_dtype="fp8")
IDS = [(7 * n * n) % CONFIG.vocab_size for n in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(V41ForCausalLM.random(CONFIG, seed=3), tmp_path)
    return tmp_path


def tables(model: nn.Module) -> list[Tensor]:
    return [p for module in model.modules() if isinstance(module, EngramTable) for p in module.parameters()]


def check_placed(model: nn.Module, device: str) -> None:
    """All but the tables is on `device`, and these lie on the host."""
    held = [*model.parameters(), *model.buffers()]
    on_host = {id(t) for t in held if t.device.type == "cpu"}
    assert on_host == {id(t) for t in tables(model)}
    assert {t.device.type for t in held if id(t) not in on_host} == {device}


def test_only_tables_stay_on_the_host(folder: Path) -> None:
    model = V41ForCausalLM.from_checkpoint(folder, "meta")
    check_placed(model, "meta")
    there = V41ForCausalLM.from_checkpoint(folder)
    assert len(tables(model)) == 2 * len(CONFIG.engram_layer_ids)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(tables(model), tables(there), strict=True)
    )


def anew(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a torch without CUDA has no tensors that pretend to it")
@torch.no_grad()
def test_nothing_else_meets_another_device() -> None:
    real: Batch = build_batch(CONFIG, Cache.zeros(CONFIG, 1, 20), [Chunk(IDS, 0, 0)])
    with FakeTensorMode():
        model = V41ForCausalLM(CONFIG)
        for module in model.modules():
            if isinstance(module, EngramTable):
                continue
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(anew(parameter), requires_grad=False))
            for name, buffer in [*module.named_buffers(recurse=False)]:
                setattr(module, name, anew(buffer))
        check_placed(model, "cuda")
        batch: Any = tree_map_only(Tensor, anew, real)
        assert model(batch, Cache.zeros(CONFIG, 1, 20, "cuda")).device.type == "cuda"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_a_gpu_reads_the_hosts_tables(folder: Path) -> None:
    """The same rows, bit for bit; logits within what compiled runs are held to; no GPU memory for tables."""
    before = torch.cuda.memory_allocated()
    host, model = V41ForCausalLM.from_checkpoint(folder), V41ForCausalLM.from_checkpoint(folder, "cuda")
    check_placed(model, "cuda")
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda")
    assert torch.cuda.memory_allocated() - before < 1.1 * held + 2**20
    logits = []
    for each, device in ((host, "cpu"), (model, "cuda")):
        cache = Cache.zeros(CONFIG, 1, 20, device)
        batch = build_batch(CONFIG, cache, [Chunk(IDS, 0, 0, every_logit=True)])
        logits.append(each(batch, cache).cpu().double().log_softmax(-1))
    for i in CONFIG.engram_layer_ids:
        ours, theirs = model.layers[i].engram, host.layers[i].engram
        assert isinstance(ours, Engram) and isinstance(theirs, Engram)
        rows = theirs.rows(build_batch(CONFIG, Cache.zeros(CONFIG, 1, 20), [Chunk(IDS, 0, 0)]).lookback)
        assert torch.equal(ours.embed(rows.cuda()).cpu(), theirs.embed(rows))
    kl = (logits[0].exp() * (logits[0] - logits[1])).sum(-1)
    assert kl.median() <= KL_LIMIT
