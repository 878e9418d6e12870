"""What reports and the command need of torch's private parts."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, export, ops

TORCH = os.path.dirname(torch.__file__) + os.sep


def not_whole() -> tuple[type[Exception], ...]:
    """What torch.compile(fullgraph=True) raises where Dynamo would have to cut the graph."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError)


def failed_in_backend(error: BaseException) -> Exception | None:
    """What a backend raised, where torch.compile says that one failed."""
    from torch._dynamo import exc

    return error.inner_exception if isinstance(error, exc.BackendCompilerFailed) else None


def told_by_dynamo(error: BaseException) -> tuple[str, traceback.FrameSummary | None]:
    """What went wrong while Dynamo traced, in a line, and the frame of the model that it was at: behind torch's own
    modules, which the model calls.

    An exception that the model raised itself stands in the context that Dynamo gives, what an operator raised in the
    explanation, behind `got`.
    """
    reason, _, rest = (str(error).strip() or type(error).__name__).partition("\n")
    got = re.search(r": got (.+)$", rest.partition("\n")[0])
    context = re.search(r"Developer debug context: (raised exception .+)", rest)
    found = got or context
    stack = list(getattr(error, "real_stack", None) or ())
    theirs = [frame for frame in stack if not frame.filename.startswith(TORCH)]
    return (found[1].rstrip(".") if found else reason), next(reversed(theirs or stack), None)


@contextlib.contextmanager
def without_a_log_of_fakes() -> Iterator[None]:
    """Under it torch does not log the traceback of an operator that fails on tensors without storage: it is raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


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
    from torch._logging import _internal

    write = getattr(_internal, "trace_structured", None)
    if write is not None:
        told = {"name": name, "encoding": "json"}
        write("artifact", metadata_fn=lambda: told, payload_fn=text, expect_trace_id=False)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Those of torch.export, and of norms of a whole layer that of Inductor, which the compiler has too."""
    from torch._inductor.decomposition import select_decomp_table

    op = ops.aten.native_layer_norm.default
    return {**dict(export.default_decompositions().items()), op: select_decomp_table()[op]}
