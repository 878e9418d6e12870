"""Attention of every preset, all heads or a rank's share of them, compiles for Hopper and Blackwell, whether it reads
records in caches, as programs have it, or is handed them.

Next to nothing is spilled. What each takes stands at the end of the tests' output.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.lowering.templates.regions import kernel_of, lying_kernel
from tests.strategies.attention import Spelling
from tests.strategies.record_gathers import Lying
from v41.lowering.cross_compile import Request, compile_for
from v41.lowering.rowwise.schedule import ALL
from v41.lowering.templates.attention import AttentionKernel
from v41.lowering.templates.attention.launch import by_rows
from v41.model_def.config import V41Config

POINTER = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.bool: "*i1", torch.uint8: "*u8",
           torch.int16: "*i16", torch.int32: "*i32"}  # fmt: skip
SPILLED = {"sm_90": 64, "sm_100": 448}  # bytes a thread, of each of two launches: 40 with Triton 3.6 and on sm_90, 400
# on sm_100 with 3.9
OF_ONE = {False: 512, True: 2048}  # of one on sm_90: at most 40 with Triton 3.6, 400 and 1,984 with 3.9
SHARED = 227 << 10  # bytes a program may have


def spelling(preset: str, ratio: int, ranks: int) -> Spelling:
    """The attention of a layer of `preset` on one of `ranks` ranks; ratio 0: it sees its window alone."""
    config = V41Config.preset(preset)
    return Spelling(
        picked=config.index_topk if ratio else None,
        heads=config.num_attention_heads // ranks,
        width=config.head_dim,
        rotary=config.qk_rope_head_dim,
        window=config.sliding_window,
    )


def requests(kernel: AttentionKernel, rows: int, arch: str) -> list[Request]:
    """What `rows` rows launch."""
    described = [(what.shape, what.dtype) for what in kernel.inputs if what is not None]
    given = iter([torch.empty([rows if size is None else size for size in shape], dtype=d) for shape, d in described])
    inputs = [None if what is None else next(given) for what in kernel.inputs]
    call = kernel.prepare(inputs, by_rows(rows, one_launch=arch == "sm_90"))
    of_each = (POINTER[arg.dtype] if isinstance(arg, torch.Tensor) else "i32" for arg in call.arguments)
    types = dict(zip(kernel.function.arg_names, of_each, strict=False))
    return [
        Request(str(kernel.path), kernel.name, types, constants | {"PACKED": True}, arch, (), options)  # as on a GPU
        for _, constants, options in call.steps()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ("sm_90", "sm_100"))
@pytest.mark.parametrize(
    ("preset", "ratio", "ranks", "lies"),
    [
        ("flash", 1, 1, True),
        ("flash", 1, 1, False),
        ("flash", 0, 1, True),
        ("flash", 1, 4, True),
        ("flash", 1, 8, True),
        ("tiny", 1, 1, True),
    ],
)
def test_compiles_with_hardly_a_spill(
    preset: str, ratio: int, ranks: int, lies: bool, arch: str, record_property: Callable[[str, object], None]
) -> None:
    spelled = spelling(preset, ratio, ranks)
    kernel = lying_kernel(Lying(spelled)) if lies else kernel_of(spelled)
    asked = [request for rows in (1, 16, 64, 1024) for request in requests(kernel, rows, arch)]
    for request, fact in zip(asked, compile_for(asked), strict=True):
        step, slice_ = request.constants["STEP"], request.constants["SLICE"]
        where = "in place" if lies else "handed"
        label = f"{preset}/{ranks} ratio {ratio} {where} {fact.arch} STEP={step} SLICE={slice_}"
        facts = f"{fact.registers} registers, {fact.spill_bytes} bytes spilled, {fact.shared_bytes} shared"
        record_property(label, facts)
        assert fact.spill_bytes <= (OF_ONE[lies] if step == ALL else SPILLED[arch]), label
        assert fact.shared_bytes <= SHARED, label
        products = ("mma.sync" if kernel.heads < 64 else "tcgen05" if arch == "sm_100" else "wgmma") + "."
        made = [each for each in ("mma.sync.", "tcgen05.mma.", "wgmma.mma") if each in fact.ptx]
        assert len(made) == 1 and made[0].startswith(products), f"{label}: another order of sums, or a trap"


def test_presets_differ_in_what_their_kernels_are() -> None:
    """bench has flash's widths: one kernel for both."""
    assert spelling("bench", 1, 1) == spelling("flash", 1, 1) != spelling("tiny", 1, 1)
