"""trial: thousands of sums over ranks in a replayed graph, held against what torch makes of the same numbers.

Run once before sums are trusted to hardware that has never done it: a word torn in two, a flag that overtakes its data,
a rank that gets ahead would show here. Every rank sleeps on the device at times of its own, so ranks drift apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from v41.channels import Workspace
from v41.lowering.rowwise import Unsupported
from v41.lowering.templates.all_reduce import SummingKernel, generate

ROWS = (1, 5, 40, 300)  # one shot with tiles of several heights, and two shots with both sizes of blocks
WIDTH = 512
SETS = 3  # of numbers, in turn: odd, so that no call may find what the call two before it left
NAP = 20_000  # cycles of the device
functional = torch.ops._c10d_functional


class _Sum(nn.Module):
    def forward(self, part: Tensor, residual: Tensor) -> Tensor:
        return residual + functional.wait_tensor(functional.all_reduce(part, "sum", "0"))


def kernel_of(ranks: int) -> SummingKernel:
    """The kernel that is tried: a sum over `ranks` and a residual."""
    given = tuple(torch.zeros(7, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(_Sum(), given, dynamic_shapes=({0: rows}, {0: rows}))
    body = program.run_decompositions().graph_module
    made = generate(body, ranks, "trial")
    assert not isinstance(made, Unsupported), made
    return made


def parts(ranks: int, rows: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Every rank's part, the residual, and what comes out: the sum in the order of ranks, rounded, then added."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(rows, WIDTH, generator=generator).bfloat16() for _ in range(ranks + 1)]
    total = numbers[0].float()
    for each in numbers[1:-1]:
        total = total + each.float()
    return numbers[:-1], numbers[-1], numbers[-1] + total.bfloat16()


@torch.no_grad()
def trial(workspace: Workspace, calls: int = 10_000) -> str | None:
    """What went wrong in so many calls of each of ROWS, or None. Collective, on the device of `workspace`."""
    kernel, device, rank = kernel_of(workspace.ranks), workspace.counters.device, workspace.rank
    kernel.bind(workspace)
    wrong = torch.zeros(len(ROWS), dtype=torch.int64, device=device)
    cases: list[tuple[int, list[Any], Tensor]] = []
    for at in range(SETS):
        for number, rows in enumerate(ROWS):
            theirs, residual, expected = parts(workspace.ranks, rows, 100 * at + number)
            given = iter([theirs[rank].to(device), residual.to(device)])
            cases.append((number, [rows if what is None else next(given) for what in kernel.inputs],
                          expected.to(device)))  # fmt: skip

    def once() -> None:
        for turn, (number, inputs, expected) in enumerate(cases):
            if turn % workspace.ranks == rank:
                torch.cuda._sleep(NAP)
            (result,) = kernel.launch(*inputs)
            wrong[number] += (result != expected).sum()

    once()
    torch.cuda.synchronize(device)
    workspace.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    for replay in range(-(-calls // SETS)):
        graph.replay()
        if replay % 64 == 0:
            torch.cuda.synchronize(device)
            workspace.check()
    torch.cuda.synchronize(device)
    workspace.check()
    bad = {rows: count for rows, count in zip(ROWS, wrong.tolist(), strict=True) if count}
    return f"elements that differ from torch's, by rows: {bad}" if bad else None
