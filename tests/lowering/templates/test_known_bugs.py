"""What went wrong in serving stacks with selections, sentinels, lengths of pads and short contexts goes right here.

    vllm#57454             candidate blocks scored NaN were lost             test_index_scores: a_score_of_nan_costs_...
    vllm#58215, #56464     sentinels as columns, negative ends of rows       here; test_topk: fewer_than_k_are_padded..
    vllm#51593             a pad's length of -1 hung the selection           here
    vllm#51782, #52149     more close scores than a buffer holds             here; test_topk: nothing_is_dropped_...
    vllm#51970, #51499     nobody sees an entry                              here
    vllm#52492             "all are picked" baked into a graph               here
    vllm#54955             ties, where parts are merged                      test_topk: a_tie_at_the_border_...
    vllm#56506             launches as wide as the cache                     here
    local-inference-lab/vllm#101   pads in a live slot                       here
    pypto-lib#715, ascend#15246    the batch's longest length for all rows   test_index_scores: every_form_chooses
    pypto-lib#1014, vllm#57432     what is missing counted in a softmax      test_attention: what_hidden_keys_...,
                                   a_row_that_sees_no_key_..., every_form_attends (blocks that are not full)
    ds4#358                row and k swapped                                 test_topk: picks_are_the_models
    vllm#57136, #56771     rows of pads left unwritten                       test_index_scores: pads_and_other_rows_...
"""

from __future__ import annotations

import pytest
import torch

from tests.lowering.templates.indexers import Case, Inputs
from tests.lowering.templates.launched import interpret
from tests.lowering.templates.test_topk import check_picks
from tests.triton_interpreter import Interpreter

HALVED = Case(keep=3, ratio=2, heads=2)  # a source of candidates: an entry a group of two tokens
LISTED = Case(given="candidate_blocks", keep=4, k=6, heads=2)


def without_end(inputs: Inputs, *ends: int) -> Inputs:
    """The rows at these positions."""
    return inputs._replace(positions=torch.tensor(ends))


@pytest.mark.parametrize("case", [HALVED, LISTED], ids=["all entries", "a list"])
def test_rows_that_end_below_zero_pick_nothing_and_the_selection_ends(interpreter: Interpreter, case: Case) -> None:
    """A pad has position -1, a draft that was turned down may have any; all stand in a slot that lives."""
    inputs = case.inputs(((40, 1), (12, 1), (30, 1)))
    clean, _ = case.run(interpreter, inputs)
    found, _ = case.run(interpreter, without_end(inputs, 40, -1, -1000))
    assert torch.equal(found["picks"][0], clean["picks"][0]) and (found["picks"][1:] == -1).all()
    assert "kept" not in found or not found["kept"][1:].any()
    pads, _ = case.run(interpreter, without_end(inputs, -1, -1, -1))
    assert (pads["picks"] == -1).all()


def test_where_nobody_sees_an_entry_nothing_is_picked_or_kept(interpreter: Interpreter) -> None:
    """The first token of a group is in no entry yet: every length is 0."""
    inputs = HALVED.inputs(((0, 1), (0, 1)))
    assert not HALVED.seen(inputs).any()
    found, scores = HALVED.run(interpreter, inputs)
    assert (found["picks"] == -1).all() and not found["kept"].any() and (scores == -torch.inf).all()


@pytest.mark.parametrize("first, later", [((2, 1), (40, 55)), ((55, 40), (1, 2))], ids=["longer", "shorter"])
def test_what_was_recorded_on_short_contexts_is_right_on_long_ones(
    interpreter: Interpreter, first: tuple[int, int], later: tuple[int, int]
) -> None:
    """As a replayed graph: the same launches on the same memory, in which positions have become others."""
    case = Case(keep=3, heads=2)
    inputs = case.inputs(((55, 1), (40, 1)))
    inputs.positions.copy_(torch.tensor(first))
    kernel = case.kernel
    steps, outputs = kernel.steps(inputs.arguments)
    for ends in (first, later):
        inputs.positions.copy_(torch.tensor(ends))
        for output in outputs:
            output.zero_()
        interpret(interpreter, kernel, steps)
        wanted = case.eager(inputs)
        for name, output in zip(kernel.form.outputs, outputs, strict=True):
            assert torch.equal(output, wanted[name]), (ends, name)


def test_launches_are_as_wide_as_the_context_and_not_as_the_cache() -> None:
    small, large = (Case(keep=3, capacity=capacity) for capacity in (61, 50_000))
    inputs = small.inputs(((40, 1), (17, 1)))
    roomy = inputs._replace(cache=torch.zeros(3, 50_000, 17, dtype=torch.uint8))
    grids = [[step.grid for step in case.kernel.steps(given.arguments)[0]]
             for case, given in ((small, inputs), (large, roomy))]  # fmt: skip
    assert grids[0] == grids[1]


def test_no_selection_has_a_buffer_that_close_scores_overflow(interpreter: Interpreter) -> None:
    """20,000 scores in one bf16 bin, where 16,384 were a buffer's size; the best lie at the end."""
    scores = torch.linspace(1.0, 1.003, 20_000)[None]
    check_picks(interpreter, scores, 512)
