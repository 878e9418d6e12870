"""What is known of GPUs is one table: whoever launches, compiles, predicts or tells goes by the same numbers."""

from __future__ import annotations

import pytest
import torch

from v41.gpu_facts import KNOWN
from v41.lowering.gpu import as_on, gpu_of
from v41.passes.analysis.times import Machine
from v41.tools.cli import parser
from v41.tools.gpus import GPUS
from v41.tools.kernels import ARCHS
from v41.tools.pretended_ranks import shared_memory


@pytest.mark.parametrize("arch", KNOWN)
def test_launches_and_ranks_that_are_pretended_are_of_the_gpu_that_is_named(arch: str) -> None:
    with as_on(arch):
        assert gpu_of(torch.device("cpu")) is KNOWN[arch]
    assert shared_memory(2, arch).processors == KNOWN[arch].multiprocessors


def test_every_name_of_a_gpu_and_every_prediction_is_of_one_that_is_known() -> None:
    assert {gpu.arch for gpu in GPUS.values()} <= {*KNOWN} and tuple(KNOWN) == ARCHS
    machine = Machine()
    assert machine.multiprocessors == KNOWN[GPUS[machine.name].arch].multiprocessors
    for arch in KNOWN:
        assert parser().parse_args(["kernels", "--arch", arch]).arch == arch
