"""pieces: of a function, what becomes regions of one kind, each as the piece that a program would have of it.

    (body,) = pieces_of(attention, inputs, ["rows", ...], (canonicalize, outline_attention), "attention")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from v41._compat_trace import functional_aten, mark_rows
from v41.passes.partition import partition
from v41.regions import regions

Pass = Callable[[GraphModule], object]


def pieces_of(
    fn: Callable[..., Any], arguments: Sequence[Tensor], sizes: Sequence[str], passes: Sequence[Pass], kind: str
) -> list[GraphModule]:
    """The bodies of the pieces of `fn` that are regions of `kind`, in order.

    sizes: what the first dimension of each of the first arguments counts; of those behind them it is a number.
    """
    found: list[GraphModule] = []

    def keep(gm: GraphModule, fake: Sequence[Any]) -> Callable[[list[Any]], Any]:
        def run(given: list[Any]) -> Any:
            return gm(*given)

        found.append(gm)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    for tensor, size in zip(arguments, sizes, strict=False):
        mark_rows(tensor, size)
    with torch.no_grad():
        torch.compile(fn, backend=lambda gm, fake: functional_aten(gm, fake, keep, keep))(*arguments)
    (gm,) = found
    for run in passes:
        run(gm)
    return [each.body for each in partition(gm, cut_at=(kind,)).pieces if list(regions(each.body, kind))]
