"""packed_products: weights stored as MXFP4 are read as they are stored; the site is exact, and all else stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_interpreter import Interpreter
from v41.lowering.cross_compile import Request, compile_for
from v41.lowering.packed_products import (
    KERNEL,
    Tiles,
    constants,
    decoded,
    packed_of_fakes,
    packed_on_cpu,
    step_of,
    tiles_for,
)
from v41.lowering.templates.decode import UNIT

ARCHITECTURES = ("sm_90", "sm_100")
GROUPS, COLUMNS = 5, 72
TERMS = (32, 96, 160, 256, 512)
GROUP = 32
TILES = (Tiles(16), Tiles(32, 128), Tiles(16, 64, 4))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def case(sizes: list[int], terms: int, group: int = GROUP, seed: int = 0) -> tuple[Tensor, ...]:
    """x in the model's order, pairs, scales, ends of groups of `sizes`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), terms, generator=generator).bfloat16()
    pairs = torch.randint(0, 256, (len(sizes), COLUMNS, terms // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (len(sizes), COLUMNS, terms // group), generator=generator, dtype=torch.uint8)
    return x, pairs, scales, torch.tensor(sizes).cumsum(0).int()


def in_order(x: Tensor, step: int) -> Tensor:
    return x.unflatten(1, (-1, step // UNIT, UNIT)).mT.flatten(1).contiguous()


def truth_of(pairs: Tensor, scales: Tensor) -> Tensor:
    """fp64 [groups, columns, terms], by the definition of the format."""
    grid = torch.tensor((*E2M1, *(-size for size in E2M1)), dtype=torch.float64)
    values = grid[torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).long()]
    powers = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.long() - 127)
    return values * powers.repeat_interleave(values.shape[-1] // scales.shape[-1], -1)


def interpreted(
    interpreter: Interpreter, x: Tensor, pairs: Tensor, scales: Tensor, ends: Tensor, tiles: Tiles
) -> Tensor:
    groups, columns, terms = pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]
    step = step_of(terms)
    out = torch.full((len(x), columns), float("nan"), dtype=x.dtype)
    grid = (groups * -(-columns // tiles.columns),)
    given = constants(columns, terms, terms // scales.shape[2], step, tiles)
    return interpreter.launch(KERNEL.path, KERNEL.name, grid, in_order(x, step), pairs.view(torch.int16), scales, ends,
                              out, **given, PACKED=False)[4]  # fmt: skip


def by_loop(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """fp64, each row with its group's weights."""
    group = torch.searchsorted(ends.long(), torch.arange(len(x)), right=True)
    return torch.einsum("rk,rnk->rn", x.double(), weights[group])


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


# ---- the kernel


@settings(max_examples=12)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=GROUPS), st.sampled_from(TILES), st.sampled_from(TERMS),
       st.sampled_from((16, 32)), st.integers(0, 99))  # fmt: skip
def test_each_row_meets_its_groups_weights(
    interpreter: Interpreter, sizes: list[int], tiles: Tiles, terms: int, group: int, seed: int
) -> None:
    x, pairs, scales, ends = case(sizes, terms, group, seed)
    truth, ours = by_loop(x, truth_of(pairs, scales), ends), interpreted(interpreter, x, pairs, scales, ends, tiles)
    limit = max(1.5 * rms(eager(x, pairs, scales, ends).double() - truth), 2.0**-8 * rms(truth))
    assert ours.shape == truth.shape and rms(ours.double() - truth) <= limit


def eager(x: Tensor, pairs: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    weights, sizes = truth_of(pairs, scales).bfloat16(), ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(a, w) for a, w in zip(x.split(sizes), weights, strict=True)])


def test_a_row_has_the_same_bits_in_any_batch_and_NaN_stays_in_its_row(interpreter: Interpreter) -> None:
    x, *weights, ends = case([3, 0, 17, 1, 2], 96)
    whole = interpreted(interpreter, x, *weights, ends, TILES[0])
    alone = interpreted(interpreter, x[5:6], *weights, torch.tensor([0, 0, 1, 1, 1]).int(), TILES[0])
    assert torch.equal(alone[0], whole[5])
    x[4] = float("nan")
    dirty = interpreted(interpreter, x, *weights, ends, TILES[0])
    assert dirty[4].isnan().all() and torch.equal(dirty[torch.arange(23) != 4], whole[torch.arange(23) != 4])


def test_rows_behind_the_last_end_are_not_written(interpreter: Interpreter) -> None:
    x, *weights, ends = case([3, 2], 64)
    out = interpreted(interpreter, torch.cat((x, x)), *weights, ends, TILES[0])
    assert not out[:5].isnan().any() and out[5:].isnan().all()


def test_every_code_under_every_scale(interpreter: Interpreter) -> None:
    """One product a byte: x picks a term of a column, whose scale is the column's number."""
    pairs = torch.arange(256, dtype=torch.uint8).expand(1, 253, 256).contiguous()
    scales = torch.arange(253, dtype=torch.uint8)[:, None].expand(1, 253, 16).contiguous()
    wanted = truth_of(pairs, scales)[0]
    assert torch.equal(decoded(pairs[0], scales[0]).double(), wanted.float().bfloat16().double())
    x, ends = torch.eye(512).bfloat16(), torch.tensor([512]).int()
    ours = interpreted(interpreter, x, pairs, scales, ends, Tiles(64, 128)).mT
    assert torch.equal(ours.double(), wanted.float().bfloat16().double())


@pytest.mark.parametrize("rows", [1, 6, 96, 97, 384, 1536, 24_576])
def test_tiles_hold_most_groups(rows: int) -> None:
    assert tiles_for(rows, 384).rows >= min(128, 2 * rows / 384)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_released_widths_compile_without_a_spill(arch: str, record_property: Callable[..., None]) -> None:
    types = {"x": "*bf16", "units": "*i16", "scales": "*u8", "ends": "*i32", "out": "*bf16"}
    requests = []
    for columns, terms in ((2304, 5120), (5120, 2304)):
        for rows in (6, 384 * 6, 24_576):
            tiles = tiles_for(rows, 384)
            given = constants(columns, terms, 32, step_of(terms), tiles) | {"PACKED": True}
            requests.append(Request(str(KERNEL.path), KERNEL.name, types, given, arch, (), {"num_warps": tiles.warps}))
    for request, facts in zip(requests, compile_for(requests), strict=True):
        record_property(f"{arch} {request.constants}", f"{facts.registers} registers, {facts.shared_bytes} shared")
        assert facts.spill_bytes == 0 and facts.shared_bytes <= 114 << 10  # two programs at a time


# ---- the operator


@given(st.lists(st.integers(0, 9), min_size=1, max_size=GROUPS), st.sampled_from(TERMS), st.integers(0, 99))
def test_on_a_cpu_each_group_is_decoded_alone(sizes: list[int], terms: int, seed: int) -> None:
    x, pairs, scales, ends = case(sizes, terms, seed=seed)
    step = step_of(terms)
    ours = packed_on_cpu(in_order(x, step), pairs, scales, ends, step)
    assert torch.equal(ours, eager(x, pairs, scales, ends))
    assert ours.shape == packed_of_fakes(x, pairs, scales, ends, step).shape
