"""sum_contenders: who may add up over ranks and go on with the sum, as callables to time.

    fused               the generated kernel; of parts that it makes itself, "apart" makes them first, as it was without
    nccl, one-shot      a library's all-reduce, with the generated boundary, eager or torch.compile behind, or nothing

Parts that are made of something are made by Inductor's kernel for all but the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from v41._compat_symmetric import symmetric_tensors
from v41.lowering.rowwise import pass_over
from v41.tools.bench.sum_cases import CASES, Case
from v41.tools.bench.sum_ranks import Place, group_of

Call = Callable[..., Any]
Maker = Callable[[int], Call]  # for a number of rows


def contenders(place: Place, case: Case) -> dict[str, Maker]:
    """By name: what makes a callable for a number of rows. All take what this rank has of the sum, then the others."""
    kernel, behind = case.kernel(place.ranks), pass_over(case.behind(), case.name)
    kernel.bind(place.workspace)
    group = group_of().group_name

    def library(part: Tensor, *others: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    def torchs(name: str, then: Call) -> Maker:
        def make(rows: int) -> Call:
            memory, kept = symmetric_tensors(rows * case.width // 2, place.device, group_of())
            mine = memory[place.rank].view(torch.bfloat16).view(rows, case.width)
            mine.normal_()
            operator = getattr(torch.ops.symm_mem, name)
            part_of = _maker_of_parts(case)

            def call(*given: Tensor) -> Any:
                assert kept is not None
                if case.owned > 1:
                    mine.copy_(part_of(*given[: case.owned]))
                return then(operator(mine, "sum", group), *given[case.owned :])

            return call

        return make

    def in_place(then: Call) -> Maker:
        def make(rows: int) -> Call:
            part_of = _maker_of_parts(case)
            return lambda *given: then(library(part_of(*given[: case.owned])), *given[case.owned :])

        return make

    def compiled(rows: int) -> Call:
        torch.compiler.reset()
        made = torch.compile(case.plain, options={"reorder_for_locality": False}, dynamic=False)
        return in_place(made)(rows)

    def nothing(total: Tensor, *others: Tensor) -> Tensor:
        return total

    found: dict[str, Maker] = {"fused": lambda rows: kernel.launch}
    if case.owned > 1:
        found["apart"] = _apart(place, case)
    found |= {
        "one-shot + boundary": torchs("one_shot_all_reduce", behind.launch),
        "two-shot + boundary": torchs("two_shot_all_reduce_", behind.launch),
        "boundary alone": lambda rows: lambda *given: behind.launch(given[case.owned - 1], *given[case.owned :]),
        "one-shot alone": torchs("one_shot_all_reduce", nothing),
        "two-shot alone": torchs("two_shot_all_reduce_", nothing),
    }
    if place.nccl:
        found |= {
            "nccl + boundary": in_place(behind.launch),
            "nccl alone": in_place(nothing),
            "nccl + eager": in_place(case.plain),
            "nccl + compile": compiled,
        }
    return found


def _apart(place: Place, case: Case) -> Maker:
    """Inductor's kernel makes the part, and the fused one adds it up."""
    kernel = CASES[case.behind_as].kernel(place.ranks)
    kernel.bind(place.workspace)

    def make(rows: int) -> Call:
        part_of = _maker_of_parts(case)
        return lambda *given: kernel.launch(part_of(*given[: case.owned]), *given[case.owned :])

    return make


def _maker_of_parts(case: Case) -> Call:
    """What makes a part of what a rank has: nothing to do where it has the part."""
    if case.owned == 1:
        return lambda part: part
    torch.compiler.reset()  # Dynamo counts compilations by the text of a function, and gives it up at eight
    return torch.compile(lambda *own: case.part(own), dynamic=False)
