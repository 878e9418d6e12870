"""What reports and the command need of torch's private parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, export, ops


def not_whole() -> tuple[type[Exception], ...]:
    """What torch.compile(fullgraph=True) raises where Dynamo would have to cut the graph."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError)


def marked_sizes(tensors: Iterable[Tensor]) -> dict[str, int]:
    """`shape_id` that `mark_unbacked` gave a dimension -> how large it is."""
    found: dict[str, int] = {}
    for tensor in tensors:
        for index, name in getattr(tensor, "_dynamo_shape_ids", {}).items():
            found.setdefault(name, tensor.shape[index])
    return found


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Writes a text into torch's structured trace (TORCH_TRACE), where tlparse shows it by that name. Where none is
    written, `text` is not asked for; an old torch without that trace writes nothing."""
    from torch._logging import _internal as logging

    write = getattr(logging, "trace_structured", None)
    if write is not None:
        told = {"name": name, "encoding": "json"}
        write("artifact", metadata_fn=lambda: told, payload_fn=text, expect_trace_id=False)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Those of torch.export, and of norms of a whole layer that of Inductor, which the compiler has too."""
    from torch._inductor.decomposition import select_decomp_table

    op = ops.aten.native_layer_norm.default
    return {**dict(export.default_decompositions().items()), op: select_decomp_table()[op]}
