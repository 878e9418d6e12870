"""A command under torchrun: each process holds its share of one model, and together they write what one would write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conftest import ROOT
from tests.model_def.rows import QUICK
from tests.model_def.test_parallel import FOUR, as_bytes
from tests.v41.rank_processes import run_ranks
from v41.model_def.checkpoint import slots
from v41.model_def.model import V41ForCausalLM
from v41.model_def.parallel import WHOLE, Share, split_dimension
from v41.tools.cli import main
from v41.tools.expected import regions_expected
from v41.tools.inspect import first_layers
from v41.tools.ranks import alike, joined, own_device, random_model


def parts(tensors: list[Tensor], name: str) -> Tensor:
    dimension = split_dimension(name)
    return torch.cat([as_bytes(each) for each in tensors], dimension) if dimension is not None else as_bytes(tensors[0])


def test_shares_of_random_weights_are_parts_of_one_model() -> None:
    config = first_layers(QUICK.replace(weight_dtype="fp8", expert_dtype="fp4"), 1)
    whole = slots(V41ForCausalLM.random(config, seed=3))
    shares = [slots(random_model(config, 3, "cpu", Share(rank, 2, "0"))) for rank in range(2)]
    for name, slot in whole.items():
        assert torch.equal(parts([share[name].parameter for share in shares], name), as_bytes(slot.parameter)), name
    alone = slots(random_model(config, 3, "cpu", WHOLE))
    assert all(torch.equal(as_bytes(alone[name].parameter), as_bytes(slot.parameter)) for name, slot in whole.items())


def test_all_of_a_share_lies_on_its_device() -> None:
    """The meta device stands in for a GPU; what is computed on the host would stay there."""
    config = first_layers(QUICK, 1)
    part = random_model(config, 3, "meta", Share(1, 2, "0"))
    assert {tensor.device.type for tensor in (*part.parameters(), *part.buffers())} == {"meta"}
    assert dict(part.named_buffers())


def test_without_torchrun_a_process_is_all_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined("cpu") as share:
        assert share is WHOLE
    assert own_device("cuda") == "cuda"


def test_each_process_takes_a_device_of_its_own_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (own_device("cuda"), own_device("cuda:0"), own_device("cpu")) == ("cuda:1", "cuda:0", "cpu")


def test_a_config_asks_for_a_sum_in_front_of_each_boundary() -> None:
    alone, shared = regions_expected(FOUR), regions_expected(FOUR, shared=True)
    fused = {name: shared[name] for name in shared.keys() - alone.keys()}
    assert sum(fused.values()) == 2 * FOUR.num_hidden_layers and alone.items() <= shared.items()


@pytest.mark.slow
def test_two_processes_generate_what_eager_does(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29511"]
    command = [*torchrun, "-m", "v41.tools.cli", "generate", "--tokens", "3", "--compare-eager", "--seeds", "1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, "--json"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert "shared by 2 ranks" in run.stdout and told["regions"]["found"] == told["regions"]["by_config"]
    assert told["ranks"] == {"count": 2, "alike": True}


def of_rank(differs: bool) -> bool:
    """Logits of this rank, the last bit of one of them its own."""
    logits = torch.ones(3, 5)
    logits[2, 4] += differs * dist.get_rank() * 2**-23
    return alike(Share.of_group(dist.group.WORLD), logits)


@pytest.mark.parametrize("differs", [False, True])
def test_a_bit_that_differs_between_ranks_is_seen_by_all(differs: bool, tmp_path: Path) -> None:
    assert run_ranks(of_rank, tmp_path, 2, differs, seconds=30) == [not differs] * 2
    assert alike(WHOLE, torch.ones(3, 5))


@pytest.mark.slow
def test_a_preset_is_inspected_as_one_of_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """All sums are fused, which the config asks for; nothing of the group stays behind."""
    assert main(["inspect", "tiny", "--layers", "1", "--ranks", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"] == "preset tiny, 1 layers, one of 2 ranks"
    assert told["regions"]["found"]["all_reduce_boundary seam"] == 1
    assert told["regions"]["found"] == told["regions"]["by_config"]
    assert not dist.is_initialized()
