"""What reports and the command need of torch's private parts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


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
