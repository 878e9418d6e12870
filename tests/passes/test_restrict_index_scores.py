"""restrict_index_scores: the same picks from the candidates alone, and no score of what grows with the context."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule

from tests.invariants import apply, check_fired_share, check_pass, copy_program
from tests.strategies.index_scores import CAPACITY, SCALES, SLOTS, WIDTH, Indexer, legal
from tests.strategies.restricted_scores import FLAWS, OF_SYMBOLS, SIZES, Pair, late_places, pair, seam
from tests.strategies.tracing import trace
from v41._compat import fake_mode_of, size_with, symbols_of
from v41._compat_trace import functional_aten
from v41.lowering.inductor import compile_piece, supported
from v41.model_def.quantization import MXFP4_RECORD
from v41.passes import restrict_index_scores as module
from v41.passes.candidate_scores import Restricted, Unsized
from v41.passes.canonicalize import canonicalize
from v41.passes.outline_index_scores import KIND, outline_index_scores
from v41.passes.re_indexers import Site
from v41.passes.replay_seam import KIND as KEPT_ROWS
from v41.passes.replay_seam import rows_taken
from v41.passes.restrict_index_scores import RULES, restrict_index_scores
from v41.regions import body_of, region_of, regions

SLOW = pytest.mark.slow
FEWER = settings(max_examples=settings.default.max_examples // 8, phases=[Phase.generate])
PLAIN = pair(Indexer(), Indexer(heads=3, chunk=2))
PASSES = (canonicalize, outline_index_scores, restrict_index_scores)


@cache
def outlined(both: Pair) -> GraphModule:
    fn, rows, stored = both.to_trace()
    static = [*rows, *stored] if both.numbers else stored
    gm = trace(fn, *() if both.numbers else rows, static=static, sizes=both.sizes)
    apply(canonicalize, gm)
    source, again = apply(outline_index_scores, gm)
    assert source.applied and again.applied
    if both.taken:
        assert seam(gm) is not None
        gm.recompile()
    return gm


def check(both: Pair) -> bool:
    """Whether the re-indexer was restricted; if so it must say so, else name the rule of its flaw."""
    gm = copy_program(outlined(both))
    if both.flaw:
        (decision,) = apply(restrict_index_scores, gm)
        assert decision.rule == FLAWS[both.flaw]
        return False
    with enable_python_dispatcher():
        (decision,) = check_pass(restrict_index_scores, gm, rows=(3, 5))
    assert decision.region is not None, decision
    attrs = decision.region.attrs
    told = attrs["restricted"], attrs["block"], attrs["keep"], attrs["k"], attrs["heads"], attrs["role"]
    assert told == (True, both.source.block, both.source.keep, both.again.k, both.again.heads, "re_indexer")
    roles = [role for role in attrs["operands"] if role != "size"]
    places = ["rows", "requests", "columns", "slots", "positions", "blocks", "candidate_blocks"]
    assert sorted(roles) == sorted(["queries", "weights", "cache", *places])
    return True


@SLOW
def test_a_re_indexer_is_restricted() -> None:
    assert check(PLAIN)


def test_the_list_is_an_output_of_the_region_that_keeps_the_blocks_in_place_of_their_mask() -> None:
    gm = copy_program(outlined(PLAIN))
    (source, _) = regions(gm, KIND)
    assert region_of(source).attrs["outputs"] == ("kept", "picks")
    assert all(each.applied for each in apply(restrict_index_scores, gm))
    source, again = regions(gm, KIND)
    assert region_of(source).attrs["outputs"] == ("picks", "kept_blocks")
    picks, blocks = source.meta["val"]
    assert blocks.dtype is torch.int64 and blocks.ndim == 2 and picks.ndim == 2
    roles = dict(zip(region_of(again).attrs["operands"], again.all_input_nodes[1:], strict=True))
    listed = roles["candidate_blocks"]
    assert (listed.args[0], listed.args[1]) == (source, 1)
    assert torch.ops.aten.topk.default not in {node.target for node in gm.graph.nodes}


def test_rows_that_a_seam_takes_of_the_mask_become_rows_of_the_list() -> None:
    """The re-indexer has the last rows of each request alone; its picks are eager's in real steps."""
    gm = check_agrees(replace(PLAIN, taken=True), lambda gm: gm)
    source, again = regions(gm, KIND)
    assert region_of(source).attrs["outputs"] == ("picks", "kept_blocks") and region_of(again).attrs["restricted"]
    (call,) = regions(gm, KEPT_ROWS)
    roles = dict(zip(region_of(again).attrs["operands"], again.all_input_nodes[1:], strict=True))
    (listed,) = [user for user in source.users if user.args[1] == 1]
    assert rows_taken(call)[listed] is roles["candidate_blocks"]
    assert len(call.meta["val"]) == 3 == len(call.users)  # positions, requests, and the list in place of the mask


@pytest.mark.parametrize("flaw", [pytest.param(each, marks=SLOW if each in OF_SYMBOLS else ()) for each in FLAWS])
def test_a_flaw_is_named_and_its_rule_is_what_refuses_it(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(Indexer(), Indexer(), flaw)
    assert not check(both)
    no_more = (FLAWS[flaw], SIZES)  # the latter refuses whatever is traced with numbers
    monkeypatch.setattr(module, "RULES", tuple(each for each in RULES if each[0] not in no_more))
    try:
        (decision,) = apply(restrict_index_scores, copy_program(outlined(both)))
    except Exception:  # damage is as good, whatever it breaks first
        return
    assert decision.applied  # no other rule refuses it


def test_an_operand_that_is_a_constant_is_made_of_the_new_sizes_and_no_other_tensor_is() -> None:
    """One that somebody else reads, too, so that it stayed in front of the region."""
    gm = copy_program(outlined(PLAIN))
    site = Site([*regions(gm, KIND)][1])
    mode = fake_mode_of([node.meta.get("val") for node in site.call.all_input_nodes])
    with gm.graph.inserting_before(site.call):
        blocks = gm.graph.call_function(torch.ops.aten.sym_size.int, (site.kept, 1))
        entries = gm.graph.call_function(operator.mul, (blocks, PLAIN.source.block))
        constant = gm.graph.call_function(torch.ops.aten.full.default, ([entries], 0.0))

    def compute(target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    assert site.kept is not None and mode is not None
    with mode:
        blocks.meta["val"], entries.meta["val"] = site.sizes["B"], site.sizes["B"] * PLAIN.source.block
        constant.meta["val"] = torch.zeros(entries.meta["val"])
        new = Restricted(site, compute, lambda node: node.meta["val"], torch.zeros(5, 2, dtype=torch.int64))
        assert new.resized(constant).shape == (2 * PLAIN.source.block,)
        with pytest.raises(Unsized):
            new.resized(site.mask)


def test_every_rule_has_a_flaw() -> None:
    assert set(FLAWS.values()) == dict(RULES).keys()


@SLOW
def test_legal_pairs_are_restricted_and_flawed_ones_are_not() -> None:
    fired: list[bool] = []

    @FEWER
    @given(legal, legal, st.sampled_from(sorted(FLAWS)))
    def draw(source: Indexer, again: Indexer, flaw: str) -> None:
        fired.extend(check(pair(source, again, each)) for each in ("", flaw))

    draw()
    check_fired_share(fired)


# ---- values of real steps, and what is computed for them


def steps(both: Pair, context: int = 15) -> Iterator[list[Tensor]]:
    """Inputs of steps: prefill and decode mixed, pad rows, rows that see few or none, all contexts.

    Values are few and keys repeat, so that scores are equal and ties decide.
    """
    block = both.source.block
    fewest = -(-max(both.source.k, both.again.k) // block)
    for seed, lengths in enumerate([(4, 1), (1, 1, 1), (6,), (2, 3), (3, 3)]):
        torch.manual_seed(seed)
        pads, requests = [0] * (seed % 2), len(lengths)
        rows = sum(lengths) + len(pads)
        ends = [n + i if seed % 2 else context - 2 * i for i, n in enumerate(lengths)]
        at = [torch.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        count = max(-(-max(ends) // block), fewest)
        first, repeats = torch.tensor([0, *lengths]).cumsum(0)[:-1], torch.tensor(lengths)
        q = [torch.randint(-2, 3, (rows, each.heads, WIDTH)).bfloat16() for each in (both.source, both.again)]
        w = [torch.randint(-1, 3, (rows, each.heads)).bfloat16() for each in (both.source, both.again)]
        late = late_places(lengths, 2) if both.taken else []
        q[1], w[1] = (each[: len(late[0])] if late else each for each in (q[1], w[1]))
        keys = torch.randint(-3, 4, (SLOTS, 4, WIDTH)).bfloat16().repeat(1, CAPACITY // 4, 1)
        of, pad = torch.arange(requests).repeat_interleave(repeats), torch.tensor(pads, dtype=torch.int64)
        columns = torch.cat([*(torch.arange(n) for n in lengths), pad])
        places = [torch.cat([*at, pad]) - int(seed == 3), torch.cat((of, pad)), columns]
        places += [first, torch.randperm(SLOTS)[:requests]]
        places += [torch.arange(max(lengths)), torch.arange(count) + int(seed == 4)]
        yield [q[0], w[0], q[1], w[1], *places, *late, MXFP4_RECORD.encode(keys) ^ SCALES]


Make = Callable[[GraphModule], Callable[..., Any]]


def compiled(both: Pair, make: Make) -> tuple[Callable[..., Any], list[GraphModule]]:
    """The pair through torch.compile and the passes, made callable by `make`; the program."""
    programs: list[GraphModule] = []

    def lower(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        for each in PASSES:
            if both.taken and each is restrict_index_scores:
                seam(gm)
            apply(each, gm)
        programs.append(gm)
        run = make(gm)

        def call(args: list[Any]) -> Any:
            return run(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch.compiler.reset()
    return torch.compile(both.choose, backend=lambda gm, inputs: functional_aten(gm, inputs, lower, lower)), programs


def marked(both: Pair, inputs: list[Tensor]) -> list[Tensor]:
    for tensor, name in zip(inputs, both.sizes, strict=False):
        torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id=name)
    return inputs


def check_agrees(both: Pair, make: Make) -> GraphModule:
    run, programs = compiled(both, make)
    with torch.no_grad():
        for inputs in steps(both):
            wanted = both.choose(*inputs)
            for found, expected in zip(run(*marked(both, inputs)), wanted, strict=True):
                assert torch.equal(found, expected)
    assert len(programs) == 1  # one program for all steps
    return programs[0]


@SLOW
def test_picks_are_eagers_in_real_steps_and_no_score_has_the_context_as_its_axis() -> None:
    gm = check_agrees(PLAIN, lambda gm: gm)
    source, again = regions(gm, KIND)
    assert "restricted" not in region_of(source).attrs and region_of(again).attrs["restricted"]
    longest = {largest_axis(source), largest_axis(again)}
    assert longest == {14, PLAIN.source.block * PLAIN.source.keep}  # 7 blocks of 2, 2 of them kept


def largest_axis(call: Any) -> int:
    """Of the fp32 values that a region computes, where there are 7 of all that is counted but rows; these are 1."""
    rows = symbols_of(call.meta["val"][0].shape[0])
    sizes = [
        size_with(size, 1 if symbols_of(size) <= rows else 7)
        for node in body_of(call).graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor) and value.dtype is torch.float32 and value.ndim == 2
        for size in value.shape[1:]
    ]
    return max(sizes)


MANY = pair(Indexer(heads=8, chunk=8), Indexer(heads=8, chunk=8, k=4))


@SLOW
def test_with_many_heads_in_a_sum_other_picks_are_as_good() -> None:
    """Eager's own sum over eight heads rounds by column: picks may differ between scores that rounding cannot tell."""
    run, _ = compiled(MANY, lambda gm: gm)
    for inputs in steps(MANY, context=60):
        torch.manual_seed(int(inputs[4].sum()))
        q, w = torch.randn_like(inputs[2]).round(), torch.randn_like(inputs[3])
        inputs[2:4] = [q, w]
        with torch.no_grad():
            wanted, found = MANY.choose(*inputs)[1], run(*marked(MANY, inputs))[1]
        scores, limit = fp64_scores(inputs)
        for row, (ours, theirs) in enumerate(zip(found.tolist(), wanted.tolist(), strict=True)):
            assert ours == sorted(ours, key=lambda entry: (entry < 0, entry)) and ours.count(-1) == theirs.count(-1)
            lost, won = set(theirs) - set(ours), set(ours) - set(theirs)
            for a in lost:
                assert all(abs(float(scores[row, a] - scores[row, b])) <= limit[row, a] + limit[row, b] for b in won)


def fp64_scores(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of each row and entry, and how far a sum of eight products in fp32 may be from it."""
    q, w, requests, slots, stored = (inputs[i] for i in (2, 3, 5, 8, 11))
    keys = MXFP4_RECORD.decode(stored[slots] ^ SCALES)[requests].double()  # [T, capacity, d]
    matches = torch.einsum("thd,ted->the", q.double(), keys).relu()
    terms = matches * (w.float() * MANY.again.scale).double().unsqueeze(-1)
    return terms.sum(1), 8 * 2**-24 * terms.abs().sum(1)


WRONG: dict[str, tuple[Any, str, Any]] = {  # bugs of the pass, and what each replaces
    "-1 is taken for entry 0": (Restricted, "entries_at", lambda self, picks: picks),
    "entries are not those of the candidates": (Restricted, "of_candidates", lambda self, counted: self.columns),
    "all blocks are candidates": (module, "candidate_blocks", lambda call, kept, keep: all_blocks(call, kept, keep)),
}


def all_blocks(call: Callable[..., Any], kept: Any, keep: int) -> Any:
    blocks = right_blocks(call, kept, keep)
    return call(torch.ops.aten.clamp_min.default, blocks, 0)


right_blocks = module.candidate_blocks


@SLOW
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_pass_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = WRONG[bug]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        check_agrees(PLAIN, lambda gm: gm)


@SLOW
def test_inductor_compiles_what_is_left() -> None:
    if supported(torch.device("cpu")) is not None:
        pytest.skip("Inductor drops casts here")
    check_agrees(PLAIN, compile_piece)
