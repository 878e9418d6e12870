"""trace: a plain function becomes the functional ATen graph that the backend would capture, its rows symbolic.

Dimension 0 of every positional tensor is the row axis, one symbol for all, or one for each name in `sizes`: unbacked,
as `Batch` marks it, or backed (`backed=True`, an ordinary dynamic dimension of at least 2). Tensors in `static` are
weights: their shapes are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from v41._compat_trace import functional_aten


def trace(
    fn: Callable[..., Any],
    *rows: Tensor,
    static: Sequence[Tensor] = (),
    sizes: Sequence[str] = (),
    backed: bool = False,
    fullgraph: bool = True,
) -> GraphModule:
    """The graph of fn(*rows, *static). Its placeholders hold fake values in meta["val"]; it can be run and edited."""
    captured: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Sequence[object]) -> Callable[[list[Any]], Any]:
        captured.append(gm)

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: GraphModule, inputs: Sequence[object]) -> Any:
        return functional_aten(gm, inputs, keep, keep)

    torch.compiler.reset()
    tensors = [row.detach().clone() for row in rows]
    for index, tensor in enumerate(tensors):
        if backed:
            torch._dynamo.mark_dynamic(tensor, 0)
        else:
            torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id=sizes[index] if sizes else "rows")
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=fullgraph)(*tensors, *static)
    assert len(captured) == 1, f"{len(captured)} graphs"
    return captured[0]
