"""loops_wait: Inductor's kernels wait for all their threads between one loop over a reduction and what follows it.

    for r in ...: ... store(out + i, x)        # 4 floats a thread
    barrier                                    # this is what torch leaves out
    for r in ...: ... load(out + i)            # 8 a thread, since a 16-bit store follows: another thread's elements

Each of Triton's loads and stores may spread its elements over the threads in its own way, so what one thread stored
another reads back, before it is there: rows get values of whatever the memory held. The same holds the other way, where
the second loop writes in place what a slow thread has yet to read. torch 2.11 to 2.13 have this race
(pytorch/pytorch#190519, triton-lang/triton#10924), in looped reductions alone. A barrier costs tens of nanoseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

BARRIER = "tl.debug_barrier()"


@contextlib.contextmanager
def loops_wait() -> Iterator[None]:
    """Under it, every kernel that Inductor writes has a barrier behind each of its loops."""
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.utils import IndentedBuffer

    written = TritonKernel.codegen_body

    def codegen_body(kernel: Any) -> None:
        looped = kernel.inside_reduction and any(tree.is_loop for tree in kernel.range_trees)
        if looped and (kernel.loads or kernel.stores):
            behind = IndentedBuffer()
            behind.writeline(BARRIER)
            behind.splice(kernel.post_loop_combine)
            kernel.post_loop_combine = behind
        written(kernel)

    with patch.object(TritonKernel, "codegen_body", codegen_body):
        yield
