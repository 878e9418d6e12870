"""What a program says to other ranks is told in order, fused or not, without the constants of a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.invariants import apply
from tests.strategies.norms import trace_as_is
from tests.strategies.ranks import NAME, ranks
from tests.strategies.reduced import RANKS, Norms, Sum, added, prepared
from v41.passes.analysis.capturable import Obstacles
from v41.passes.analysis.collectives import spoken
from v41.passes.analysis.effects import effect_of
from v41.passes.analysis.sizes import NodeSizes
from v41.passes.fuse_all_reduce import fuse_all_reduce
from v41.regions import REDUCED, body_of, regions


def test_each_collective_is_a_line_and_a_fused_one_says_so() -> None:
    with ranks(RANKS):
        gm = prepared(Norms((Sum(), Sum("in fp32"), Sum(flaw="a maximum"))))
        groups, lines = spoken(gm)
        assert groups == ("0",)
        bf16 = f"all_reduce sum over group 0 of {RANKS}: torch.bfloat16 [int 5, int 64]"
        assert lines == (bf16, bf16.replace("bfloat16", "float32"), bf16.replace("sum", "max"))
        apply(fuse_all_reduce, gm)
        fused = [f"{line}, in all_reduce_boundary norm" for line in lines[:2]]
        assert spoken(gm) == (groups, (*fused, lines[2]))


def test_groups_are_numbered_by_use_and_a_constant_is_no_line() -> None:
    def of_rank(rank: int) -> Any:
        def run(x: Tensor) -> Tensor:
            later = dist.new_group([0, 1]).group_name
            return added(added(x + rank, group=later)) * added(x, group=later) * rank

        return run

    with ranks(2):
        one, other = (spoken(trace_as_is(of_rank(rank), [torch.ones(2, 3)])) for rank in (1, 7))
    assert one[1] == other[1] and [line.split()[4] for line in one[1]] == ["0", "1", "0"]
    assert one[0][1] == "0" and one[0] != other[0]  # the second time, torch gives the new group another name


def test_a_collective_through_the_host_cannot_be_captured_on_a_device() -> None:
    with ranks(RANKS):
        gm = prepared(Norms((Sum(),)))
        apply(fuse_all_reduce, gm)
        (call,) = regions(gm, REDUCED)
        by_host, on_cpu = (Obstacles(torch.device(device), NodeSizes()) for device in ("cuda", "cpu"))
        begin, wait = (node for node in body_of(call).graph.nodes if effect_of(node) == "collective")
        told = f"_c10d_functional.all_reduce by {NAME} goes through the host"
        assert told in str(by_host.of(begin)) and told in str(by_host.of(call))
        assert on_cpu.of(begin) is None and on_cpu.of(call) is None
        assert "goes through the host" not in str(by_host.of(wait))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert "goes through the host" not in str(by_host.of(begin))
    finally:
        dist.destroy_process_group()
