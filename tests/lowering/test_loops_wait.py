"""Inductor's looped kernels for a GPU: what one loop stores and the next reads back has a barrier between."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.lowering.gpu_text import gpu_text, hopper, on_cuda
from v41 import _compat_barriers
from v41._compat_sizes import with_sizes
from v41.model_def.mhc import collapse, expand
from v41.model_def.norm import rms_norm

WIDTH = 256


def collapsed_norm(A: Tensor, B: Tensor, C: Tensor, X: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor]:
    """Mixed streams, their weighted sum and its norm: the sum is stored in one loop and read back in the next."""
    return (rms_norm(collapse(expand(X, y, C, B), A), scale, 1e-6),)


def text_of_norm() -> str:
    """Of any number of rows, as a piece has them: of numbers Inductor makes other kernels."""
    shapes = ShapeEnv()
    mode, rows = FakeTensorMode(shape_env=shapes), shapes.create_unbacked_symint()
    wide, half = [(rows, 4), (rows, 4, 4), (rows, 4)], [(rows, 4, WIDTH), (rows, WIDTH), (WIDTH,)]
    inputs = [on_cuda(mode, *shape) for shape in wide]
    inputs += [on_cuda(mode, *shape, dtype=torch.bfloat16) for shape in half]
    with hopper():
        sized = with_sizes(make_fx(collapsed_norm, select_decomp_table())(*inputs), {str(rows): 256})
    return gpu_text(sized.gm, sized.metas)


def loops(text: str) -> list[str]:
    """What each kernel with two loops has between them."""
    found = []
    for kernel in text.split("@triton.jit")[1:]:
        parts = kernel.split("in tl.range(")
        found += parts[1:-1]
    return found


def check_waits(between: str) -> None:
    stored, behind = between.rindex("tl.store("), between.find(_compat_barriers.BARRIER)
    assert stored < behind, f"no barrier behind the store of the loop before:\n{between}"


def test_a_value_that_the_next_loop_reads_back_is_there() -> None:
    between = [part for part in loops(text_of_norm()) if "tl.store(" in part]
    assert between, "no kernel stores in one loop what it reads in the next: the case is gone, find another"
    for part in between:
        check_waits(part)


def test_torch_itself_leaves_the_barrier_out() -> None:
    """Where this fails, torch has put it in: ours can go for that release."""
    with patch.object(_compat_barriers, "loops_wait", contextlib.nullcontext):
        text = text_of_norm()
    assert _compat_barriers.BARRIER not in text and any("tl.store(" in part for part in loops(text))
