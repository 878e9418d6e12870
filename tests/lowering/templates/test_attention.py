"""Generated attention: within the contract, the same bits whatever way it is launched and whatever is beside a row."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.invariants import copy_program
from tests.lowering.rowwise.running import ULP, interpret, rms
from tests.lowering.templates.regions import by_role, inputs_of, kernel_of, piece
from tests.strategies.attention import Spelling
from tests.triton_interpreter import Interpreter
from v41.lowering.generated import GeneratedPiece, generate_piece
from v41.lowering.gpu import as_on
from v41.lowering.rowwise import Unsupported
from v41.lowering.templates.attention import AttentionKernel, Spread, generate
from v41.lowering.templates.attention.form import KIND, RULES, form_of
from v41.lowering.templates.attention.launch import MOST_IN_TWO, by_rows
from v41.lowering.templates.attention.text import AHEAD, blocks_of, tile_of
from v41.lowering.templates.lone import lone_region
from v41.passes.attention_core import attend
from v41.passes.turns import turn
from v41.regions import region_of

MODEL = Spelling(window=20, picked=70, heads=5, width=64, rotary=16)  # blocks of both kinds, a last one not full
CASES = (
    MODEL,
    Spelling(
        records="all fp8", picked=5, window=3, heads=17, turned_back=False, width=64
    ),  # heads padded; turns one way
    Spelling(records="mxfp4", rope="none", picked=17, window=2, width=64),
    Spelling(records="window", rope="slices", picked=3, window=33, width=64),  # numbers as they are behind records
    Spelling(records="none", picked=None, heads=1, window=5, width=64),
)
TILED = Spelling(window=3, picked=130, heads=33, width=64, rotary=16)  # two blocks a tile; one is behind the last key
SPREADS = (Spread(0, 8), Spread(16, stages=3), Spread(32, whole=False))
MANY = Spelling(records="none", rope="none", picked=None, window=2, heads=70, width=64)  # more heads than a tile holds


def exactly(spelling: Spelling, inputs: list[Any]) -> Tensor:
    """What `spelling` asks for, in fp64 throughout."""
    given = by_role(piece(spelling), inputs)
    q, rows, width = given["queries"].double(), len(given["queries"]), spelling.width
    q = q.reshape(rows, spelling.heads, width)
    tables = [given[name].double()[:, None] for name in ("cos", "sin") if name in given]
    keys = [given[name] if record is None else record.decode(given[name])
            for name, record in zip(("window", "picked"), spelling.formats, strict=True) if name in given]  # fmt: skip
    seen = torch.cat([given["visible"], *(given[name] >= 0 for name in ("picks",) if name in given)], 1)
    k = torch.cat([each.double() for each in keys], 1).masked_fill(~seen[..., None], 0)
    q = turn(q, *tables, "adjacent", "last") if tables else q
    _, o = attend(q, k, seen, width**-0.5, given["sink"].double()[:, None])
    o = o.masked_fill(~seen.any(1)[:, None, None], 0)
    return turn(o, tables[0], -tables[1], "adjacent", "last") if tables and spelling.turned_back else o


def check_contract(spelling: Spelling, inputs: list[Any], ours: Tensor) -> None:
    """RMS error against fp64 at most 1.5 times eager's, or one ulp of the RMS."""
    truth, eager = exactly(spelling, inputs), piece(spelling)(*inputs)[0]
    assert (ours.dtype, ours.shape) == (eager.dtype, eager.shape)
    limit = max(1.5 * rms(eager.double().reshape(truth.shape) - truth), ULP[ours.dtype] * rms(truth))
    assert rms(ours.double().reshape(truth.shape) - truth) <= limit


def check_same_bits(interpreter: Interpreter, spelling: Spelling, inputs: list[Any]) -> Tensor:
    """One result from all ways to launch, and from the last row alone."""
    kernel, rows = kernel_of(spelling), inputs_rows(inputs)
    first, *others = [interpret(interpreter, kernel, inputs, spread)[0] for spread in SPREADS]
    for other in others:
        assert torch.equal(first, other)
    for spread in SPREADS[:2]:
        (alone,) = interpret(interpreter, kernel, of_rows(inputs, rows, slice(rows - 1, rows)), spread)
        assert torch.equal(first[-1:], alone)
    return first


def inputs_rows(inputs: list[Any]) -> int:
    return max(len(value) for value in inputs if isinstance(value, Tensor) and value.ndim > 1)


def of_rows(inputs: list[Any], rows: int, some: slice) -> list[Any]:
    count = len(range(rows)[some])
    return [count if not isinstance(value, Tensor) else value[some].contiguous() if value.ndim > 1 else value
            for value in inputs]  # fmt: skip


@settings(max_examples=6)
@given(st.sampled_from(CASES), st.integers(1, 2), st.integers(0, 99), st.sampled_from((0.0, 0.1, 0.6, 1.0)))
def test_attends_within_the_contract_in_the_same_bits_any_way(
    interpreter: Interpreter, spelling: Spelling, rows: int, seed: int, seen: float
) -> None:
    inputs = inputs_of(piece(spelling), spelling, rows, seed, seen)
    check_contract(spelling, inputs, check_same_bits(interpreter, spelling, inputs))


@pytest.mark.parametrize("spelling", CASES, ids=lambda s: s.records)
def test_every_form_attends(interpreter: Interpreter, spelling: Spelling) -> None:
    inputs = inputs_of(piece(spelling), spelling, 3)
    check_contract(spelling, inputs, interpret(interpreter, kernel_of(spelling), inputs, SPREADS[0])[0])


def test_two_blocks_of_a_tile_have_the_bits_that_they_have_one_after_the_other(interpreter: Interpreter) -> None:
    """What p and o are multiplied by is exact wherever it is applied: the second launch knows the last top at once."""
    form = form_of(lone_region(piece(TILED), KIND))
    assert [(tile_of(branch, form), blocks_of(branch, form)) for branch in form.branches] == [(64, 1), (128, 4)]
    inputs = inputs_of(piece(TILED), TILED, 1)
    by_role(piece(TILED), inputs)["picks"][0, 64:] = -1  # of the second tile nothing is seen
    check_contract(TILED, inputs, check_same_bits(interpreter, TILED, inputs))


def test_more_heads_than_a_tile_holds(interpreter: Interpreter) -> None:
    inputs = inputs_of(piece(MANY), MANY, 2)
    check_contract(MANY, inputs, check_same_bits(interpreter, MANY, inputs))


@pytest.mark.parametrize("heads", [3, pytest.param(64, marks=pytest.mark.slow)])
def test_wide_heads_have_the_same_bits_whether_summed_in_one_product_or_in_several(
    interpreter: Interpreter, heads: int
) -> None:
    """Records as the released model has them, read by words; heads of four and of two products."""
    for width in (512, 256) if heads > 3 else (256,):
        spelling = Spelling(picked=128, window=64, heads=heads, width=width, rotary=64)
        inputs = inputs_of(piece(spelling), spelling, 1)
        check_contract(spelling, inputs, check_same_bits(interpreter, spelling, inputs))


def test_p_is_rounded_relative_to_a_power_of_two_above_the_largest_score(interpreter: Interpreter) -> None:
    """Of one block of keys; unrounded p, or p relative to the largest score itself, changes more than one in four."""
    spelling = CASES[-1]
    inputs = inputs_of(piece(spelling), spelling, 12)
    (ours,) = interpret(interpreter, kernel_of(spelling), inputs, SPREADS[0])
    given = by_role(piece(spelling), inputs)
    q, cos, sin = given["queries"].double(), given["cos"].double()[:, None], given["sin"].double()[:, None]
    q = turn(q.reshape(12, spelling.heads, spelling.width), cos, sin, "adjacent", "last").bfloat16().double()
    k, seen = given["window"].double(), given["visible"][:, None]
    x = (torch.einsum("thd,tkd->thk", q, k) * spelling.width**-0.5).masked_fill(~seen, -torch.inf) * math.log2(math.e)
    above = x.amax(-1, keepdim=True).clamp(min=-1e30).ceil()
    p, sink = (x - above).exp2(), (given["sink"].double()[:, None] * math.log2(math.e) - above).exp2()

    def same(p: Tensor, rounded: Tensor) -> float:
        o = (torch.einsum("thk,tkd->thd", rounded, k) / (p.sum(-1, keepdim=True) + sink)).bfloat16().double()
        o = turn(o, cos, -sin, "adjacent", "last").bfloat16()
        return (ours.reshape(o.shape) == o).double().mean().item()

    top = (x - x.amax(-1, keepdim=True).clamp(min=-1e30)).exp2()
    assert same(p, p.bfloat16().double()) > 0.98
    assert same(p, p) < 0.75 and same(p, top.bfloat16().double() * (p / top.clamp(min=1e-300))) < 0.75


def test_what_hidden_keys_and_other_rows_hold_reaches_no_row(interpreter: Interpreter) -> None:
    """Bytes of NaN in hidden records, NaN in a pad row: kept rows have the bits that they have without."""
    kernel, body = kernel_of(MODEL), piece(MODEL)
    clean = inputs_of(body, MODEL, 3)
    dirty = [value.clone() if isinstance(value, Tensor) else value for value in clean]
    given = by_role(body, dirty)
    given["window"][~given["visible"]] = 255
    given["picked"][given["picks"] < 0] = 255
    given["queries"][1] = torch.nan
    given["cos"][1] = torch.nan
    given["window"][1] = 255
    for spread in SPREADS[:2]:
        (before,), (after,) = (interpret(interpreter, kernel, inputs, spread) for inputs in (clean, dirty))
        assert torch.equal(before[::2], after[::2]) and after[1].isnan().any()


@pytest.mark.parametrize("spread", SPREADS[:2], ids=["one launch", "two launches"])
def test_a_row_that_sees_no_key_gets_zeros(interpreter: Interpreter, spread: Spread) -> None:
    inputs = inputs_of(piece(MODEL), MODEL, 2, seen=0.0)
    by_role(piece(MODEL), inputs)["picks"][1, 3] = 0
    (ours,) = interpret(interpreter, kernel_of(MODEL), inputs, spread)
    assert not ours[0].any() and ours[1].any()


def test_no_rows_launch_nothing() -> None:
    call = kernel_of(MODEL).prepare(inputs_of(piece(MODEL), MODEL, 0))
    assert call.launches == [] and call.outputs[0].shape[0] == 0


def test_few_rows_are_spread_over_programs_and_many_are_not() -> None:
    kernel = kernel_of(MODEL)
    launches = [kernel.prepare(inputs_of(piece(MODEL), MODEL, rows)).launches for rows in (1, 100)]
    assert [len(each) for each in launches] == [2, 1]
    assert launches[1][0][0] == (100, 1)
    assert by_rows(100, one_launch=False) == by_rows(MOST_IN_TWO, one_launch=True) == by_rows(9, one_launch=False)
    assert by_rows(1, one_launch=False) == by_rows(1, one_launch=True)


@pytest.mark.parametrize(("arch", "early"), [("sm_80", False), ("sm_90", True), ("sm_100", True)])
def test_the_second_launch_comes_up_early_where_the_device_can_do_it(arch: str, early: bool) -> None:
    """Of few rows and of more. Little memory holds few channels."""
    kernel = kernel_of(MODEL)
    with as_on(arch):
        few, more = (kernel.prepare(inputs_of(piece(MODEL), MODEL, rows)).steps() for rows in (1, 16))
    assert [len(few), len(more)] == [2, 2]
    for steps in (few, more):
        assert ["launch_pdl" in options for *_, options in steps] == [False, early]
        assert all(constants["PDL"] == early for _, constants, _ in steps)
        assert all(constants["WHOLE"] == (arch != "sm_80") for _, constants, _ in steps)
        assert steps[0][2]["num_warps"] == (4 if arch == "sm_80" else 8)
    places = [kernel.source.index(each) for each in ("held0 = ", "gdc_wait()", "= of_all(tops", "tl.load(parts")]
    assert places == sorted(places), "records do not wait, what the first launch stores does"


def test_records_that_are_read_at_once_give_the_bits_of_those_read_tile_after_tile(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, inputs = kernel_of(MODEL), inputs_of(piece(MODEL), MODEL, 2)
    monkeypatch.setattr(import_module(blocks_of.__module__), "AHEAD", 1)
    in_turn = kernel_of(MODEL)
    assert "held1 = " in at_once.source and "num_stages=STAGES" not in at_once.source
    assert "held1 = " not in in_turn.source and "num_stages=STAGES" in in_turn.source
    (ours,), (theirs,) = (interpret(interpreter, each, inputs, Spread(32)) for each in (at_once, in_turn))
    assert torch.equal(ours, theirs)
    check_contract(MODEL, inputs, ours)


def test_stages_are_tried_where_tiles_are_read_in_turn() -> None:
    kernel, device = kernel_of(MODEL), torch.device("cpu")
    assert all(each.stages == 1 for each in kernel.candidates(1, device))
    assert any(each.stages > 1 for each in replace(kernel, keys=(AHEAD + 1, 9)).candidates(100, torch.device("cpu")))


def test_a_piece_that_attends_is_generated_by_the_template() -> None:
    made = generate_piece(piece(MODEL), "attention", "piece")
    assert isinstance(made, GeneratedPiece) and isinstance(made.kernel, AttentionKernel)
    (result,) = made(*inputs_of(piece(MODEL), MODEL, 0))
    assert result.shape == (0, MODEL.heads, MODEL.width)
    assert pickle.loads(pickle.dumps(made.kernel)).source == made.kernel.source


# ---- what is refused


FLAWS: dict[str, dict[str, Any]] = {  # sentence of RULES -> attributes that break it
    "rounds p to something else than bf16": {"p": "float32"},
    "takes p relative to something else than the largest score": {"p_over": "total"},
    "has no sink": {"sink": False, "empty": "nan"},
    "shows what hidden keys hold": {"reads_hidden": True},
    "hides keys by other masks than a bool and picks": {"masks": ("hidden", "picks")},
    "reads records in another way": {"sources": ("rows", "pages")},
    "turns other channels than the last, in adjacent pairs": {
        "rope": {"width": 16, "pairs": "halves", "channels": "last"}
    },
    "has heads of other widths than powers of two from 64 to 512": {"width": 48},
    "packs keys in another way": {"keys": (("e4m3", "ue8m0", 32, 68), "as_is")},
}


@pytest.fixture
def attrs() -> Any:
    """Of the region of MODEL, which a test may change."""
    found = region_of(lone_region(piece(MODEL), KIND)).attrs
    kept = dict(found)
    yield found
    found.clear()
    found.update(kept)


@pytest.mark.parametrize("sentence", [sentence for sentence, _ in RULES])
def test_an_attribute_beyond_the_template_is_refused_by_its_rule(attrs: dict[str, Any], sentence: str) -> None:
    attrs.update(FLAWS[sentence])
    refusal = generate(piece(MODEL))
    assert isinstance(refusal, Unsupported) and refusal.reason == sentence
    assert refusal.node == lone_region(piece(MODEL), KIND).name


def test_an_operand_that_lies_otherwise_is_refused() -> None:
    body = copy_program(piece(MODEL))
    node = next(node for node, role in roles(body).items() if role == "window")
    node.meta = {"val": node.meta["val"][:, ::2]}
    refusal = generate(body)
    assert isinstance(refusal, Unsupported) and (refusal.node, "strides" in refusal.reason) == (node.name, True)


def test_a_piece_that_computes_more_is_refused() -> None:
    body = copy_program(piece(MODEL))
    (result,) = body.graph.output_node().args[0]
    with body.graph.inserting_after(result):
        more = body.graph.call_function(torch.ops.aten.neg.default, (result,))
    more.meta = dict(result.meta)
    refusal = generate(body)
    assert isinstance(refusal, Unsupported) and "beside" in refusal.reason


def roles(body: Any) -> dict[Any, str]:
    call = lone_region(body, KIND)
    return dict(zip(call.args[2:], region_of(call).attrs["operands"], strict=True))


def test_the_text_says_what_it_is_and_is_named_by_what_it_computes() -> None:
    kernel = kernel_of(MODEL)
    assert isinstance(kernel, AttentionKernel) and kernel.source.startswith(f'"""{kernel.name}: generated by')
    assert "attention, 5 heads of 64, scale 0.125, a sink, RoPE of the last 16 channels, signs (1, -1)" in kernel.source
    assert "70 picked, hidden by picks, e2m1 under e4m3 a 16, 36 bytes; 2 blocks" in kernel.source
    assert kernel.name != kernel_of(CASES[1]).name
    assert form_of(lone_region(piece(MODEL), KIND)).scale == 64**-0.5
