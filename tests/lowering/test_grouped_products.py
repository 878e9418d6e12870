"""grouped_products: few rows a group meet each group's weights once; the site is exact, and all else stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering import grouped_kernel
from v41.lowering import grouped_products as module
from v41.lowering.cross_compile import Request, compile_for
from v41.lowering.grouped_products import MEAN, Tiles, grouped_of_fakes, grouped_on_gpu, grouped_products, tiles_for

ARCHITECTURES = ("sm_90", "sm_100")
GROUPS, COLUMNS, TERMS = 5, 72, 80
TILES = (Tiles(16, 64, 32), Tiles(32, 64, 128), Tiles(16, 128, 64))


def case(sizes: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and ends of groups of `sizes`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), TERMS, generator=generator).bfloat16()
    weights = torch.randn(len(sizes), COLUMNS, TERMS, generator=generator).bfloat16()
    return x, weights, torch.tensor(sizes).cumsum(0).int()


def interpreted(interpreter: Interpreter, x: Tensor, weights: Tensor, ends: Tensor, tiles: Tiles) -> Tensor:
    groups, columns, terms = weights.shape
    out = torch.full((len(x), columns), float("nan"), dtype=x.dtype)
    grid = (groups * -(-columns // tiles.columns),)
    constants = {"COLUMNS": columns, "TERMS": terms, "ROWS": tiles.rows, "BLOCK": tiles.columns, "STEP": tiles.terms,
                 "STAGES": tiles.stages}  # fmt: skip
    return interpreter.launch(Path(grouped_kernel.__file__), "grouped", grid, x, weights, ends, out,
                              **constants)[3]  # fmt: skip


def by_loop(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """fp64, each row with its group's weights."""
    group = torch.searchsorted(ends.long(), torch.arange(len(x)), right=True)
    return torch.einsum("rk,rnk->rn", x.double(), weights.double()[group])


@settings(max_examples=12)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=GROUPS), st.sampled_from(TILES), st.integers(0, 99))
def test_each_row_meets_its_groups_weights(interpreter: Interpreter, sizes: list[int], tiles: Tiles, seed: int) -> None:
    x, weights, ends = case(sizes, seed)
    truth, ours = by_loop(x, weights, ends), interpreted(interpreter, x, weights, ends, tiles)
    eager = torch.cat([a @ w.mT for a, w in zip(x.split(sizes), weights, strict=True)])
    limit = max(1.5 * rms(eager.double() - truth), 2.0**-8 * rms(truth))
    assert ours.shape == truth.shape and rms(ours.double() - truth) <= limit


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def test_a_row_has_the_same_bits_in_any_batch_and_NaN_stays_in_its_row(interpreter: Interpreter) -> None:
    x, weights, ends = case([3, 0, 17, 1, 2])
    whole = interpreted(interpreter, x, weights, ends, TILES[0])
    alone = interpreted(interpreter, x[5:6], weights, torch.tensor([0, 0, 1, 1, 1]).int(), TILES[0])
    assert torch.equal(alone[0], whole[5])
    x[4] = float("nan")
    dirty = interpreted(interpreter, x, weights, ends, TILES[0])
    assert dirty[4].isnan().all() and torch.equal(dirty[torch.arange(23) != 4], whole[torch.arange(23) != 4])


def test_rows_behind_the_last_end_are_not_written(interpreter: Interpreter) -> None:
    x, weights, ends = case([3, 2])
    out = interpreted(interpreter, torch.cat((x, x)), weights, ends, TILES[0])
    assert not out[:5].isnan().any() and out[5:].isnan().all()


@pytest.mark.parametrize("rows", [1, 6, 96, 97, 384, 1536, 2304])
def test_tiles_hold_most_groups(rows: int) -> None:
    tiles = tiles_for(rows, 96)
    assert tiles.rows >= min(128, 2 * rows / 96)


# ---- the rewrite

WEIGHTS = torch.randn(4, 24, 16).bfloat16()
ENDS = torch.tensor([2, 3, 3, 5]).int()
KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weights lie the other way": lambda x, w, e: F.grouped_mm(x, w.mT.contiguous(), offs=e),
    "a slice of the weights": lambda x, w, e: F.grouped_mm(x[:, :8], w[:, :, :8].mT, offs=e),
}


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(5, 16).to(dtype), WEIGHTS.to(dtype), ENDS


def rewritten(fn: Callable[..., Tensor], *given: Tensor) -> tuple[int, bool]:
    """How many sites `fn` has, and whether the graph gives the same afterwards."""
    x, *static = given
    gm = trace(fn, x, static=static)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    by_axes = {each.ndim: each for each in given}
    arguments = [by_axes[value.ndim] if isinstance(value, Tensor) else len(x) for value in values]
    before = gm(*arguments)
    found = grouped_products(gm, ("cpu",))
    gm.graph.lint()
    return found, all(torch.equal(a, b) for a, b in zip(before, gm(*arguments), strict=True))


def test_a_grouped_product_of_weights_as_they_lie_is_a_site() -> None:
    assert rewritten(lambda x, w, e: F.grouped_mm(x, w.mT, offs=e), *inputs()) == (1, True)
    two = lambda x, w, e: F.grouped_mm(x, w.mT, offs=e) * F.grouped_mm(x + 1, w.mT, offs=e)
    assert rewritten(two, *inputs()) == (2, True)


@pytest.mark.parametrize("name", KEPT)
def test_what_lies_otherwise_stays(name: str) -> None:
    assert rewritten(KEPT[name], *inputs()) == (0, True)


def test_other_devices_stay() -> None:
    gm = trace(lambda x, w, e: F.grouped_mm(x, w.mT, offs=e), inputs()[0], static=inputs()[1:])
    assert grouped_products(gm) == 0


def test_many_rows_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(module, "launch", lambda x, w, e: launched.append(len(x)))
    x, w, ends = torch.randn(4 * MEAN + 1, 16).bfloat16(), WEIGHTS, ENDS * MEAN
    grouped_on_gpu(x[:-1], w, ends)
    assert launched == [4 * MEAN]
    assert grouped_on_gpu(x, w, ends).shape == grouped_of_fakes(x, w, ends).shape and launched == [4 * MEAN]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_released_widths_compile_without_a_spill(arch: str, record_property: Callable[..., None]) -> None:
    types = {"x": "*bf16", "weights": "*bf16", "ends": "*i32", "out": "*bf16"}
    requests = []
    for columns, terms in ((2304, 5120), (5120, 2304)):
        for rows in (6, 1536):
            tiles = tiles_for(rows, 96)
            constants = {"COLUMNS": columns, "TERMS": terms, "ROWS": tiles.rows, "BLOCK": tiles.columns,
                         "STEP": tiles.terms, "STAGES": tiles.stages}  # fmt: skip
            requests.append(Request(grouped_kernel.__file__, "grouped", types, constants, arch, (),
                                    {"num_warps": tiles.warps}))  # fmt: skip
    for request, facts in zip(requests, compile_for(requests), strict=True):
        record_property(f"{arch} {request.constants}", f"{facts.registers} registers, {facts.shared_bytes} shared")
        assert facts.spill_bytes == 0 and facts.shared_bytes <= 114 << 10  # two programs at a time
        assert facts.ptx.count("ld.global") <= 2, "weights go through registers, so few bytes are on their way"
