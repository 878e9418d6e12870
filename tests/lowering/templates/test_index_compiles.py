"""Index scores and selections at released sizes compile for Hopper and Blackwell; the longest tiles spill a little.

What each takes stands at the end of the tests' output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.lowering.templates.indexers import OPERANDS
from v41.lowering.cross_compile import Facts, Request, compile_for
from v41.lowering.gpu import as_on
from v41.lowering.rowwise import Kernel
from v41.lowering.templates.index_scores import Form, Spread, kernel_of
from v41.lowering.templates.topk import TopK
from v41.lowering.templates.topk.launch import LARGEST, Step
from v41.model_def.config import V41Config

POINTER = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
           torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8"}  # fmt: skip
SPILLED, LITTLE = 352, 32  # bytes a thread, of tiles that fill the registers (328 with Triton 3.9), and of others
SHARED = 227 << 10


def requests(kernel: Kernel, steps: Sequence[Step], arch: str) -> list[Request]:
    """What `steps` launch."""
    found = []
    for step in steps:
        function = getattr(kernel.module, step.kernel)
        types = {name: POINTER[arg.dtype] if isinstance(arg, Tensor) else "i32"
                 for name, arg in zip(function.arg_names, step.arguments, strict=False)}  # fmt: skip
        even = [name for name, arg in zip(function.arg_names, step.arguments, strict=False)
                if name in ("E", "count") and arg % 16 == 0]  # fmt: skip
        path = str(kernel.path)
        found.append(Request(path, step.kernel, types, step.constants, arch, even, step.options))
    return found


def check_compiles(asked: list[Request], record_property: Callable[[str, object], None], spilled: int) -> list[Facts]:
    found = compile_for(asked)
    for request, fact in zip(asked, found, strict=True):
        label = f"{request.kernel} {request.arch} {dict(request.constants)}"
        record_property(label, f"{fact.registers} registers, {fact.spill_bytes} spilled, {fact.shared_bytes} shared")
        assert fact.shared_bytes <= SHARED, label
        held = request.constants
        most = max(held.get("TILE", LARGEST), held.get("ROOM", 0) * held.get("GROUP", 0))
        assert fact.spill_bytes <= (spilled if most == LARGEST else LITTLE), label
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", ("sm_90", "sm_100"))
@pytest.mark.parametrize(("k", "rows", "columns"), [(512, 1, 16_384), (512, 64, 131_072), (2048, 1, 65_536)])
def test_selections_compile(
    k: int, rows: int, columns: int, arch: str, record_property: Callable[[str, object], None]
) -> None:
    kernel = TopK.of(k)
    with as_on(arch):
        steps, _ = kernel.steps(torch.empty(rows, columns))
    check_compiles(requests(kernel, steps, arch), record_property, SPILLED)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ("sm_90", "sm_100"))
@pytest.mark.parametrize("role", ("source", "candidate_source", "re_indexer"))
@pytest.mark.parametrize("preset", ("flash", "tiny"))
def test_scores_compile_with_hardly_a_spill(
    preset: str, role: str, arch: str, record_property: Callable[[str, object], None]
) -> None:
    config = V41Config.preset(preset)
    given = "candidate_blocks" if role == "re_indexer" else ""
    kept = (0, 0) if role == "source" else (config.candidate_block_size, config.candidate_topk_blocks)
    heads, width = config.index_n_heads, config.index_head_dim
    outputs = ("kept", "picks") if role == "candidate_source" else ("picks",)
    form = Form(heads, width, (heads * width) ** -0.5, config.index_topk, 1, config.candidate_block_size, 1023, given,
                *kept, outputs)  # fmt: skip
    kernel = kernel_of(form, (*OPERANDS, given) if given else OPERANDS)
    int64 = torch.int64
    tensors = [torch.empty(5, heads, width, dtype=torch.bfloat16), torch.empty(5, heads, dtype=torch.bfloat16),
               torch.empty(2, 1024, width // 32 * 17, dtype=torch.uint8), *torch.empty(3, 5, dtype=int64),
               torch.empty(2, 4, dtype=int64), torch.empty(2, dtype=int64), torch.empty(128, dtype=int64),
               *([torch.empty(5, 128, dtype=int64)] if given else [])]  # fmt: skip
    asked = []
    for spread in (Spread(1, 4), Spread(1, 4, 128), *([] if given else [Spread(4, 8)])):
        with as_on(arch):
            steps, _ = kernel.steps(tensors, spread)
        asked += requests(kernel, steps[:1], arch)
    for fact in check_compiles(asked, record_property, 64):
        products = {"sm_90": "wgmma.mma", "sm_100": "tcgen05.mma."}[arch]
        assert products in fact.ptx and "mma.sync." not in fact.ptx and "mul.bf16x2" in fact.ptx
