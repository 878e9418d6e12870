"""long_products: long sums in parts; the kernel gives a row the same bits in every tile, the library what is small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fp64 import rms
from tests.triton_interpreter import Interpreter
from v41.lowering import long_product_kernel, long_products
from v41.lowering.cross_compile import Request, compile_for
from v41.lowering.gpu import as_on
from v41.lowering.long_products import PART, Tiles, is_long, long_product, tiles_for

TILES = [replace(tiles_for(rows), columns=16) for rows in (1, 17, 33, 65)]
KERNEL = Path(long_product_kernel.__file__)


def interpreted(interpreter: Interpreter, a: Tensor, b: Tensor, tiles: Tiles) -> Tensor:
    rows, (terms, columns) = a.shape[0], b.shape
    out = torch.full((rows, columns), float("nan"))
    grid = (-(-rows // tiles.rows) * -(-columns // tiles.columns),)
    constants = {"COLUMNS": columns, "TERMS": terms, "TERM_APART": b.stride(0), "COLUMN_APART": b.stride(1),
                 "PART": PART, "ROWS": tiles.rows, "BLOCK": tiles.columns, "STEP": tiles.terms,
                 "STAGES": tiles.stages}  # fmt: skip
    return interpreter.launch(KERNEL, "long_product", grid, a, b, out, rows, **constants)[2]


def factors(rows: int, columns: int, terms: int = 3 * PART, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, terms, generator=made).bfloat16() for size in (rows, columns))  # type: ignore[return-value]


@settings(max_examples=8)
@given(st.integers(1, 70), st.integers(1, 35), st.booleans(), st.sampled_from(TILES), st.integers(0, 99))
def test_the_kernel_is_the_product(
    interpreter: Interpreter, rows: int, columns: int, by_terms: bool, tiles: Tiles, seed: int
) -> None:
    a, weights = factors(rows, columns, seed=seed)
    b = weights.mT.contiguous() if by_terms else weights.mT
    truth, ours = a.double() @ b.double(), interpreted(interpreter, a, b, tiles)
    assert rms(ours.double() - truth) <= 1.5 * rms((a.float() @ b.float()).double() - truth) + 1e-7 * rms(truth)


def test_a_row_has_the_same_bits_in_every_tile_and_harms_no_other(interpreter: Interpreter) -> None:
    a, weights = factors(70, 20)
    alone = interpreted(interpreter, a[:1], weights.mT, TILES[0])
    a[1:] = float("nan")
    for tiles in TILES:
        found = interpreted(interpreter, a, weights.mT, tiles)
        assert torch.equal(found[:1], alone) and found[1:].isnan().all()


def test_a_sum_starts_anew_after_each_part(interpreter: Interpreter) -> None:
    """Beside 2^24 each of two is lost; a part of their own makes 1.25 of them, which rounds to 2 there."""
    a, weights = torch.zeros(1, 3 * PART).bfloat16(), torch.ones(1, 3 * PART).bfloat16()
    a[0, 0], a[0, PART : 2 * PART : TILES[0].terms], a[0, 2 * PART] = 2.0**24, 0.625, -(2.0**24)
    assert interpreted(interpreter, a, weights.mT, TILES[0]).item() == 2.0


def test_results_for_every_multiprocessor_come_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(long_products, "launch", lambda a, b, tiles: asked.append("kernel"))
    monkeypatch.setattr(long_products, "by_library", lambda a, b: asked.append("library"))
    rows = [torch.empty(size, 3 * PART, device="meta") for size in (0, 1, 64, 4096)]
    gate, head = (torch.empty(3 * PART, size, device="meta") for size in (384, 129280))
    for a in rows:
        long_product(a, head)  # on no GPU
    with as_on("sm_90"):
        for a in rows:
            long_product(a, head)
        for a in rows:
            long_product(a, gate)
    few, many = ["library"] * 4, ["library", "kernel", "kernel", "kernel"]
    assert asked == few + many + [*few[:3], "library"]


def test_short_and_uneven_sums_are_not_long() -> None:
    assert [is_long(terms) for terms in (0, 128, 256, 257, 384, 5120, 5128)] == [0, 0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_a_head_compiles_without_a_spill(arch: str, record_property: Callable[..., None]) -> None:
    types = {"x": "*bf16", "weights": "*bf16", "out": "*fp32", "rows": "i32"}
    requests = []
    for rows in (1, 32, 64, 256):
        tiles = tiles_for(rows)
        constants = {"COLUMNS": 129280, "TERMS": 5120, "TERM_APART": 1, "COLUMN_APART": 5120, "PART": PART,
                     "ROWS": tiles.rows, "BLOCK": tiles.columns, "STEP": tiles.terms,
                     "STAGES": tiles.stages}  # fmt: skip
        requests.append(Request(long_product_kernel.__file__, "long_product", types, constants, arch, (),
                                {"num_warps": tiles.warps}))  # fmt: skip
    for request, facts in zip(requests, compile_for(requests), strict=True):
        record_property(f"{arch} {request.constants}", f"{facts.registers} registers, {facts.shared_bytes} shared")
        assert facts.spill_bytes == 0
        assert facts.ptx.count("ld.global") == 0, "factors go through registers, so few bytes are on their way"
