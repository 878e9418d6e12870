"""What reports and the command need of torch's private parts."""

from __future__ import annotations


def not_whole() -> tuple[type[Exception], ...]:
    """What torch.compile(fullgraph=True) raises where Dynamo would have to cut the graph."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError)
