"""Generated indexers: the model's picks and blocks, the same bits in any batch, and pads that reach nobody."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.invariants import apply, copy_program
from tests.lowering.rowwise.running import rms
from tests.lowering.templates.indexers import Case, Inputs
from tests.lowering.templates.launched import interpret
from tests.strategies.index_scores import Indexer
from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.lowering.generated import GeneratedPiece, generate_piece
from v41.lowering.rowwise import Unsupported
from v41.lowering.templates.index_scores import IndexKernel, Spread, generate
from v41.lowering.templates.index_scores.form import KIND, RULES
from v41.lowering.templates.lone import lone_region
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_index_scores import outline_index_scores
from v41.passes.partition import partition
from v41.regions import body_of, region_of, regions

aten = torch.ops.aten
CASES = (
    Case(),
    Case(keep=3, ratio=2, heads=5),
    Case(keep=2, block=2, width=64, heads=3),
    Case(given="candidates", k=3, width=128),
    Case(given="candidate_blocks", keep=4, k=6),
    Case(keep=40, k=40, heads=17, kept=("kept", "kept_blocks")),  # more than there are
    Case(keep=3, block=2, kept=("kept_blocks",)),
)
QUICK = (CASES[1], CASES[4])
SLOW = pytest.mark.slow
SPREADS = (Spread(1, 1, 16), Spread(4, 2, 16), Spread(1, 4, 32), Spread(4, 1, 32, tile=32))
STEPS = (  # (first position, rows) of each request, pads
    (((40, 1), (3, 1), (17, 1)), 0),  # decode: contexts of all lengths
    (((0, 9),), 2),  # one prompt
    (((30, 3), (0, 2), (11, 4)), 1),  # chunks of several, rows of two in one program
    (((0, 1),), 0),
)


def spreads_of(case: Case) -> list[Spread]:
    """A list of candidates is one row's own."""
    return [spread for spread in SPREADS if spread.rows == 1 or case.given != "candidate_blocks"]


def check_choice(interpreter: Interpreter, case: Case, inputs: Inputs, spread: Spread | None = None) -> None:
    found, _ = case.run(interpreter, inputs, spread)
    wanted = case.eager(inputs)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@SLOW
@settings(max_examples=20)
@given(st.sampled_from(CASES), st.sampled_from(STEPS), st.integers(0, 99), st.data())
def test_chooses_as_the_model_does(
    interpreter: Interpreter, case: Case, step: Any, seed: int, data: st.DataObject
) -> None:
    """Sums are exact, so many scores are equal; ties go to the lower entry."""
    check_choice(interpreter, case, case.inputs(*step, seed), data.draw(st.sampled_from(spreads_of(case))))


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=SLOW) for case in CASES])
def test_every_form_chooses(interpreter: Interpreter, case: Case) -> None:
    check_choice(interpreter, case, case.inputs(*STEPS[2], seed=5))


@pytest.mark.parametrize("case", [CASES[0], pytest.param(CASES[1], marks=SLOW)])
def test_scores_are_within_the_contract_in_the_same_bits_any_way(interpreter: Interpreter, case: Case) -> None:
    inputs = case.inputs(*STEPS[2], seed=3, exact=False)
    (_, first), *others = [case.run(interpreter, inputs, spread) for spread in spreads_of(case)]
    for _, other in others:
        assert torch.equal(first, other)
    _, alone = case.run(interpreter, inputs.of_row(7))
    assert torch.equal(first[7:8], alone)
    truth, eager = case.scores(inputs, torch.float64), case.scores(inputs)
    shown = truth > -torch.inf
    assert torch.equal(first > -torch.inf, shown) and shown.any()
    limit = max(1.5 * rms((eager - truth)[shown]), 2.0**-23 * rms(truth[shown]))
    assert rms((first - truth)[shown]) <= limit


def test_pads_and_other_rows_reach_no_row(interpreter: Interpreter) -> None:
    """NaN in a pad and in a row, records of NaN in a slot that nobody has: kept rows are what they were."""
    case = Case(keep=3, heads=2)
    inputs = case.inputs(((13, 3), (5, 2)), pads=3)
    clean, _ = case.run(interpreter, inputs, SPREADS[1])
    dirty = inputs._replace(queries=inputs.queries.clone(), cache=inputs.cache.clone())
    dirty.queries[[1, 5, 6, 7]] = torch.nan
    (free,) = {0, 1, 2} - set(inputs.slots.tolist())
    dirty.cache[free] = 255
    found, _ = case.run(interpreter, dirty, SPREADS[1])
    kept = [0, 2, 3, 4, 5, 6, 7]
    for name in clean:
        assert torch.equal(clean[name][kept], found[name][kept])
    assert (found["picks"][[1, 5, 6, 7]] == -1).all() and not found["kept"][5:].any()
    assert found["kept"][1].sum() == 1, "the block of the newest entry is kept, whatever is scored"


def test_a_score_of_nan_costs_its_block_and_no_other(interpreter: Interpreter) -> None:
    """A scale byte of 255 is inf, and inf times 0 NaN: as in the model that block is lost, unless it is the newest."""
    case = Case(keep=4, k=8)
    inputs = case.inputs(((40, 1), (20, 1)))
    inputs.queries[:, :, 0] = 0.0
    inputs.cache[inputs.slots[0], 9, -1] = 255
    inputs.cache[inputs.slots[1], 20, -1] = 255
    assert case.scores(inputs).isnan().sum() == 2
    check_choice(interpreter, case, inputs)


def test_no_rows_and_no_entries(interpreter: Interpreter) -> None:
    case = Case(keep=3)
    inputs = case.inputs(((0, 2),))
    none = Inputs(*(tensor[:0] if i in (0, 1, 3, 4, 5) else tensor for i, tensor in enumerate(inputs[:9])))
    steps, outputs = case.kernel.steps(none.arguments)
    assert steps == [] and [len(each) for each in outputs] == [0, 0]
    found, _ = case.run(interpreter, inputs._replace(blocks=inputs.blocks[:0]))
    assert (found["picks"] == -1).all() and found["kept"].shape == (2, 0)


def test_what_a_row_does_not_see_is_not_read(interpreter: Interpreter) -> None:
    """One short context beside a long one: its slot may hold anything behind its end."""
    case = Case()
    inputs = case.inputs(((50, 1), (2, 1)))
    clean, _ = case.run(interpreter, inputs)
    inputs.cache[inputs.slots[1], 3:] = 255
    found, _ = case.run(interpreter, inputs)
    assert torch.equal(clean["picks"], found["picks"]) and found["picks"][1].tolist() == [0, 1, 2, -1, -1]


def test_few_rows_are_spread_over_programs_and_rows_of_a_prompt_share_one() -> None:
    kernel = Case(keep=3).kernel
    assert kernel.spread_for(1, 16_384, 1) == Spread(1, 1)
    assert kernel.spread_for(64, 65_536, 1) == Spread(1, 8, 128)
    assert kernel.spread_for(8192, 65_536, 8192) == Spread(4, 8)
    assert Case(given="candidate_blocks", keep=4).kernel.spread_for(8192, 16_384, 8192).rows == 1


# ---- pieces of programs


def piece(indexer: Indexer) -> GraphModule:
    """The one piece of `indexer`, traced with sizes that are numbers, that is its region."""
    fn, rows, weights = indexer.to_trace()
    gm = trace(fn, static=[*rows, *weights], sizes=indexer.all_sizes)
    apply(canonicalize, gm)
    for node in gm.graph.find_nodes(op="call_function", target=aten.clamp_min.default):
        if node.args[0].op == "placeholder":  # the strategy bounds what it draws; a step holds none below 0
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    apply(outline_index_scores, gm)
    (found,) = [each.body for each in partition(gm, cut_at=(KIND,)).pieces if list(regions(each.body, KIND))]
    return found


@pytest.fixture(scope="module")
def source() -> GraphModule:
    return piece(Indexer(role="candidate_source", scale=0.25, block=4, keep=1))


def values_of(body: GraphModule, seed: int = 0) -> list[Any]:
    """What the step of the strategy holds, with fresh numbers."""
    draw = torch.manual_seed(seed)  # of the strategy, too
    _, rows, (stored,) = Indexer(role="re_indexer").to_trace()
    (call,) = regions(body, KIND)
    roles = dict(zip(call.args[2:], region_of(call).attrs["operands"], strict=True))
    names = ("queries", "weights", "positions", "requests", "columns", "rows", "slots", "longest", "blocks")
    of: dict[str, Any] = dict(zip(names, rows, strict=False)) | {"cache": stored}
    of["rows"] = torch.tensor([[0, 1, 2, 3], [4, 4, 4, 4]])
    found = []
    for node in (node for node in body.graph.nodes if node.op == "placeholder"):
        meta, role = node.meta["val"], roles[node]
        value = torch.randint(-4, 5, meta.shape, generator=draw) if role in ("queries", "weights") else of.get(role)
        value = torch.rand(meta.shape, generator=draw) < 0.6 if role == "candidates" else value
        found.append(value.reshape(meta.shape).to(meta.dtype))
    return found


def check_piece(interpreter: Interpreter, body: GraphModule) -> None:
    made = generate_piece(body, KIND, "piece")
    assert isinstance(made, GeneratedPiece), made
    kernel = made.kernel
    assert isinstance(kernel, IndexKernel)
    values = values_of(body)
    steps, outputs = kernel.steps(values)
    interpret(interpreter, pickle.loads(pickle.dumps(kernel)), steps)
    for found, wanted in zip(outputs, body(*values), strict=True):
        assert torch.equal(found, wanted)


def test_a_piece_that_scores_is_generated_by_the_template(interpreter: Interpreter, source: GraphModule) -> None:
    check_piece(interpreter, source)


@SLOW
@pytest.mark.parametrize("indexer", [Indexer(ratio=2), Indexer(role="re_indexer", heads=3, chunk=2)])
def test_other_roles_are_generated_too(interpreter: Interpreter, indexer: Indexer) -> None:
    check_piece(interpreter, piece(indexer))


FLAWS: tuple[dict[str, Any], ...] = (  # attributes that break each of RULES, in order
    {"record": None},
    {"operands": ("keys",)},
    {"ratio": None},
    {"spread": 3},
    {"block": 128},
    {"keep": 5000},
    {"heads": 129},
)


@pytest.mark.parametrize("place", range(len(RULES)))
def test_an_attribute_beyond_the_template_is_refused_by_its_rule(source: GraphModule, place: int) -> None:
    body = copy_program(source)
    attrs = region_of(lone_region(body, KIND)).attrs
    kept = dict(attrs)
    try:
        attrs.update(FLAWS[place])
        refusal = generate(body)
    finally:
        attrs.clear()
        attrs.update(kept)
    assert isinstance(refusal, Unsupported) and refusal.reason == RULES[place][0]


def test_an_operand_that_lies_otherwise_is_refused(source: GraphModule) -> None:
    body = copy_program(source)
    call = lone_region(body, KIND)
    roles: dict[Any, str] = dict(zip(call.args[2:], region_of(call).attrs["operands"], strict=True))  # type: ignore[arg-type]
    for role, change in (("cache", lambda t: t[:, ::2]), ("queries", lambda t: t.transpose(0, 1))):
        node = next(node for node in roles if roles[node] == role)
        value: Tensor = node.meta["val"]
        node.meta = {"val": change(value)}
        refusal = generate(body)
        node.meta = {"val": value}
        assert isinstance(refusal, Unsupported) and (refusal.node, "strides" in refusal.reason) == (node.name, True)


@pytest.mark.parametrize(
    ("role", "change", "reason"),
    [
        ("blocks", lambda t: t[None], "is blocks of 2 axes"),
        ("cache", lambda t: t.flatten(0, 1), "is cache of 2 axes"),
        ("rows", lambda t: t.flatten(), "is rows of 1 axes"),
        ("queries", lambda t: t[None], "is queries of no row an index"),
    ],
)
def test_an_operand_that_has_other_axes_is_refused(source: GraphModule, role: str, change: Any, reason: str) -> None:
    """The kernel reads sizes there; what lies in one run is no matter else."""
    body = copy_program(source)
    node = node_of(body, role)
    value: Tensor = node.meta["val"]
    node.meta = {"val": change(value)}
    refusal = generate(body)
    node.meta = {"val": value}
    assert refusal == Unsupported(node.name, node.name, reason)


def test_slots_that_are_computed_inside_are_refused(source: GraphModule) -> None:
    """Slots counted from 1, say: the kernel would read the records of other requests."""
    body = copy_program(source)
    inner = body_of(lone_region(body, KIND))
    roles = region_of(lone_region(body, KIND)).attrs["operands"]
    slots = inner.graph.find_nodes(op="placeholder")[roles.index("slots")]
    with inner.graph.inserting_after(slots):
        counted = inner.graph.call_function(aten.sub.Tensor, (slots, 1))
    counted.meta = dict(slots.meta)
    slots.replace_all_uses_with(counted, delete_user_cb=lambda user: user is not counted)
    refusal = generate(body)
    assert isinstance(refusal, Unsupported) and refusal.reason == "takes slots that it computes"
    assert isinstance(generate(source), IndexKernel)


def node_of(body: GraphModule, role: str) -> Node:
    call = lone_region(body, KIND)
    (found,) = [
        node for node, each in zip(call.args[2:], region_of(call).attrs["operands"], strict=True) if each == role
    ]
    assert isinstance(found, Node)
    return found


def test_a_piece_that_computes_more_is_refused(source: GraphModule) -> None:
    body = copy_program(source)
    result = body.graph.output_node().args[0][0]  # type: ignore[index]
    with body.graph.inserting_after(result):  # type: ignore[arg-type]
        more = body.graph.call_function(torch.ops.aten.logical_not.default, (result,))  # type: ignore[arg-type]
    more.meta = dict(result.meta)  # type: ignore[union-attr]
    refusal = generate(body)
    assert isinstance(refusal, Unsupported) and "beside" in refusal.reason


def test_the_text_says_what_it_is_and_is_named_by_what_it_computes() -> None:
    kernel, other = Case(keep=3).kernel, Case().kernel
    assert kernel.source.startswith(f'"""{kernel.name}: generated by') and kernel.name != other.name
    assert "index_scores, 4 heads of 32, scale 0.125; all entries that a row sees" in kernel.source
    assert "keeps     3 blocks of 4 entries" in kernel.source and "keeps" not in other.source[:900]
