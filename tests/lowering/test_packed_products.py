"""packed_products: weights stored as MXFP4 are read as they are stored; the site is exact, and all else stays."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule

from tests.invariants import apply
from tests.lowering.test_grouped_products import by_loop, rms
from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41 import collect
from v41._compat import inductor_keeps_explicit_casts
from v41.lowering.cross_compile import Request, compile_for
from v41.lowering.packed_products import (
    KERNEL,
    Tiles,
    _values,
    decoded,
    launch,
    launched,
    ordered,
    packed_of_fakes,
    packed_on_cpu,
    packed_products,
    step_of,
    tiles_for,
)
from v41.model_def.config import V41Config
from v41.model_def.moe import MoE, expert_ends, swiglu
from v41.model_def.quantization import decode_e2m1, power_of_two, unpack_pairs
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_experts import outline_experts
from v41.regions import META, flatten

aten = torch.ops.aten
ARCHITECTURES = ("sm_90", "sm_100")
GROUPS, COLUMNS = 5, 72
TERMS = (64, 192, 256, 640)
GROUP = 32
TILES = (Tiles(16), Tiles(32, 128), Tiles(64, 128, 4, 8))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def case(sizes: list[int], terms: int, group: int = GROUP, seed: int = 0) -> tuple[Tensor, ...]:
    """x in the model's order, pairs, scales, ends of groups of `sizes`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), terms, generator=generator).bfloat16()
    pairs = torch.randint(0, 256, (len(sizes), COLUMNS, terms // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (len(sizes), COLUMNS, terms // group), generator=generator, dtype=torch.uint8)
    return x, pairs, scales, torch.tensor(sizes).cumsum(0).int()


def truth_of(pairs: Tensor, scales: Tensor) -> Tensor:
    """fp64 [groups, columns, terms], by the definition of the format."""
    grid = torch.tensor((*E2M1, *(-size for size in E2M1)), dtype=torch.float64)
    values = grid[torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).long()]
    powers = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.long() - 127)
    return values * powers.repeat_interleave(values.shape[-1] // scales.shape[-1], -1)


def interpreted(
    interpreter: Interpreter, x: Tensor, pairs: Tensor, scales: Tensor, ends: Tensor, tiles: Tiles
) -> Tensor:
    step = step_of(2 * pairs.shape[2])
    out = torch.full((len(x), pairs.shape[1]), float("nan"), dtype=x.dtype)
    grid, constants = launched(len(x), pairs.shape, scales.shape[2], step, tiles)
    return interpreter.launch(KERNEL.path, KERNEL.name, grid, ordered(x, step), pairs.view(torch.int16), scales, ends,
                              out, **constants, PACKED=False)[4]  # fmt: skip


# ---- the kernel


@settings(max_examples=12)
@given(st.lists(st.just(0) | st.integers(0, 20), min_size=1, max_size=GROUPS), st.sampled_from(TILES),
       st.sampled_from(TERMS), st.sampled_from((16, 32)), st.integers(0, 99))  # fmt: skip
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
    x, *weights, ends = case([3, 0, 17, 1, 2], 192)
    whole = interpreted(interpreter, x, *weights, ends, TILES[0])
    alone = interpreted(interpreter, x[5:6], *weights, torch.tensor([0, 0, 1, 1, 1]).int(), TILES[0])
    assert torch.equal(alone[0], whole[5])
    x[4] = float("nan")
    dirty = interpreted(interpreter, x, *weights, ends, TILES[0])
    assert dirty[4].isnan().all() and torch.equal(dirty[torch.arange(23) != 4], whole[torch.arange(23) != 4])


@pytest.mark.parametrize("sizes", [[3, 2], [1, 0, 0, 0, 1]])
def test_rows_behind_the_last_end_are_not_written(interpreter: Interpreter, sizes: list[int]) -> None:
    x, *weights, ends = case(sizes, 64)
    out, count = interpreted(interpreter, torch.cat((x, x)), *weights, ends, TILES[0]), sum(sizes)
    assert not out[:count].isnan().any() and out[count:].isnan().all()


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
            _, constants = launched(rows, (384, columns, terms // 2), terms // 32, step_of(terms), tiles)
            given = constants | {"PACKED": True}
            requests.append(Request(str(KERNEL.path), KERNEL.name, types, given, arch, (), {"num_warps": tiles.warps}))
    for request, facts in zip(requests, compile_for(requests), strict=True):
        record_property(f"{arch} {request.constants}", f"{facts.registers} registers, {facts.shared_bytes} shared")
        programs = 2 if request.constants["ROWS"] < 128 else 1  # at a time
        assert facts.spill_bytes == 0 and programs * facts.shared_bytes <= 227 << 10


def test_no_scale_behind_the_last_group_is_read_ahead() -> None:
    """Loads of scales move in front of the question whether a program has rows: a row behind all has a group, too."""
    types = {"x": "*bf16", "units": "*i16", "scales": "*u8", "ends": "*i32", "out": "*bf16"}
    _, constants = launched(6, (384, 2304, 2560), 160, 128, Tiles(16))
    given = constants | {"PACKED": True}
    (facts,) = compile_for([Request(str(KERNEL.path), KERNEL.name, types, given, "sm_90", (), {"num_warps": 4})])
    assert re.search(r"min\.[su]32[^;]*, 383;", facts.ptx.split("ld.global.nc.u8")[0])


# ---- the operator


def test_pairs_that_begin_at_an_odd_byte_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x, pairs, scales, ends = case([3, 2], 64)
    odd = torch.cat((pairs.new_zeros(1), pairs.flatten()))[1:].view(pairs.shape)
    given: list[Tensor] = []
    function = defaultdict(lambda: lambda *args, **constants: given.extend(args[:4]))
    monkeypatch.setattr("v41.lowering.packed_products.KERNEL", SimpleNamespace(function=function))
    launch(x, odd, scales, ends, 64)
    assert torch.equal(given[1].view(torch.uint8), pairs) and given[1].dtype == torch.int16


@given(st.lists(st.integers(0, 9), min_size=1, max_size=GROUPS), st.sampled_from(TERMS), st.integers(0, 99))
def test_on_a_cpu_each_group_is_decoded_alone(sizes: list[int], terms: int, seed: int) -> None:
    x, pairs, scales, ends = case(sizes, terms, seed=seed)
    step = step_of(terms)
    ours = packed_on_cpu(ordered(x, step), pairs, scales, ends, step)
    assert torch.equal(ours, eager(x, pairs, scales, ends))
    assert ours.shape == packed_of_fakes(x, pairs, scales, ends, step).shape


def test_a_call_under_another_default_device_spoils_no_later_one() -> None:
    x, pairs, scales, ends = case([2, 1], 64)
    _values.cache_clear()
    with torch.device("meta"):
        packed_on_cpu(ordered(x, 64), pairs, scales, ends, 64)
    assert torch.equal(packed_on_cpu(ordered(x, 64), pairs, scales, ends, 64), eager(x, pairs, scales, ends))


# ---- the rewrite


@cache
def outlined(width: int = 64, inner: int = 64, group: int = GROUP) -> GraphModule:
    """Packed experts as a region, their operands inputs of the program; x bf16 [5, width]."""

    def fn(x: Tensor, weights: Tensor, experts: Tensor, *held: Tensor) -> Tensor:
        by = experts.flatten().argsort(stable=True)
        ends = expert_ends(experts.flatten()[by], 4)
        W1, W3, W2 = (dequantised(W, scale, group).mT for W, scale in zip(held[::2], held[1::2], strict=True))
        rows = x[by // 2]
        a = swiglu(F.grouped_mm(rows, W1, offs=ends), F.grouped_mm(rows, W3, offs=ends), 10.0)
        a = (a * weights.flatten()[by].unsqueeze(-1)).to(x.dtype)
        y = F.grouped_mm(a, W2, offs=ends)
        return y[by.argsort()].view(-1, 2, width).float().sum(1).to(x.dtype)

    gm = trace(fn, *inputs(width), static=stored(width, inner, group))
    for each in (canonicalize, outline_experts):
        apply(each, gm)
    return gm


def dequantised(pairs: Tensor, scales: Tensor, group: int) -> Tensor:
    values = decode_e2m1(unpack_pairs(pairs)).unflatten(-1, (-1, group))
    return (values * power_of_two(scales)[..., None]).flatten(-2).bfloat16()


def inputs(width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    picks = torch.rand(5, 4, generator=generator).topk(2).indices
    return torch.randn(5, width, generator=generator).bfloat16(), torch.rand(5, 2, generator=generator), picks


def stored(width: int, inner: int, group: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    held = []
    for columns, terms in ((inner, width), (inner, width), (width, inner)):
        for least, most, count in ((0, 256, terms // 2), (118, 124, terms // group)):
            held.append(torch.randint(least, most, (4, columns, count), generator=generator, dtype=torch.uint8))
    return held


def arguments(gm: GraphModule, width: int, inner: int, group: int) -> list[Any]:
    """What `gm` takes, in its order: inputs by their shape and dtype, each of the same shape in turn."""
    left = [*inputs(width), *stored(width, inner, group)]
    given: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            given.append(5)
            continue
        fits = lambda each, value=value: each.dtype == value.dtype and tuple(each.shape[1:]) == tuple(value.shape[1:])
        index = next(i for i, each in enumerate(left) if fits(each))
        given.append(left.pop(index))
    return given


@pytest.mark.parametrize(("width", "inner", "group", "found"), [
    (64, 64, 32, (3, 0)), (128, 192, 16, (3, 0)), (64, 96, 32, (2, 1)), (256, 128, 64, (3, 0))])  # fmt: skip
def test_products_of_a_region_read_what_is_stored(width: int, inner: int, group: int, found: tuple[int, int]) -> None:
    gm = outlined(width, inner, group)
    flat = flatten(gm)
    given = arguments(flat, width, inner, group)
    (before,) = flat(*given)
    assert packed_products(flat) == found
    flat.graph.lint()
    taken = flat.graph.find_nodes(op="call_function", target=torch.ops.v41.packed_product.default)
    left = flat.graph.find_nodes(op="call_function", target=aten._grouped_mm.default)
    assert (len(taken), len(left)) == found
    assert len({node.args[0] for node in taken}) == 2 if found[0] == 3 else 1, "W1 and W3 take the same rows"
    (after,) = flat(*given)
    assert torch.equal(before, after)
    whole = [node for node in flat.graph.nodes if str(getattr(node.meta.get("val"), "shape", "")) == str(
        torch.Size([4, inner, width]))]  # fmt: skip
    assert not whole or found[1], "nothing as large as all of W1 is left"


def test_a_product_in_no_region_and_other_devices_stay() -> None:
    flat = flatten(outlined())
    assert packed_products(flat, ("cuda",)) == (0, 3)
    for node in flat.graph.nodes:
        node.meta.pop(META, None)
    assert packed_products(flat) == (0, 0)


def test_pairs_that_do_not_lie_side_by_side_stay() -> None:
    flat = flatten(outlined())
    for node in flat.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.shape[-1] == 32:
            node.meta["val"] = value.new_empty_strided(value.shape, (value.stride(0) * 2, *value.stride()[1:]))
    assert packed_products(flat) == (0, 3)


@pytest.mark.parametrize("axes", [(0, 2, 1), (2, 1, 0)])
def test_products_that_are_no_transpose_of_what_is_stored_stay(axes: tuple[int, ...]) -> None:
    """Though all their sizes fit: as many experts as columns and terms, or as many columns as terms."""
    flat = flatten(outlined())
    for product in flat.graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        weights = product.args[1]
        assert weights.target is aten.permute.default
        with flat.graph.inserting_before(product):
            turned = flat.graph.call_function(aten.permute.default, (weights, list(axes)))
        turned.meta = {**weights.meta, "val": weights.meta["val"]}
        product.update_arg(1, turned)
    assert packed_products(flat) == (0, 3)


def test_codes_that_were_widened_outside_stay() -> None:
    flat = flatten(outlined())
    for node in flat.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.shape[-1] == 32:
            node.meta["val"] = value.int()
    assert packed_products(flat) == (0, 3)


def test_layers_that_share_a_body_are_all_taken() -> None:
    gm = outlined()
    twice = Graph()
    given = [twice.node_copy(node) for node in gm.graph.find_nodes(op="placeholder")]
    names = dict(zip(gm.graph.find_nodes(op="placeholder"), given, strict=True))
    first = twice.graph_copy(gm.graph, dict(names))
    second = twice.graph_copy(gm.graph, dict(names))
    twice.output((*first, *second))  # type: ignore[misc]
    both = GraphModule(gm, twice)
    flat = flatten(both)
    assert packed_products(flat) == (6, 0)
    a, b = flat(*arguments(flat, 64, 64, GROUP))
    assert torch.equal(a, b)


def test_the_report_says_what_is_read_as_stored_and_a_model_keeps_its_bits() -> None:
    config = V41Config.preset("tiny").replace(expert_dtype="fp4", weight_dtype="fp8")
    torch.manual_seed(0)
    model = MoE(config).requires_grad_(False)
    x = torch.randn(7, config.hidden_size).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad(), collect() as reports:
        found = torch.compile(model, backend="v41", options={"codegen": "inductor"})(x)
        assert torch.equal(found, model(x)) or not inductor_keeps_explicit_casts()
    assert reports[0].options["packed products"] == ("3 read weights as they are stored", "v41")
