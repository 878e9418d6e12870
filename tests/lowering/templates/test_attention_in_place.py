"""Generated attention that reads records where they lie has the bits of one that is handed them, and reads no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.lowering.rowwise.running import interpret
from tests.lowering.templates.regions import by_role, fitted, inputs_of, kernel_of, lying_kernel, lying_piece, piece
from tests.strategies.attention import Spelling
from tests.strategies.record_gathers import Lying
from tests.triton_interpreter import Interpreter
from v41.lowering.templates.attention import Spread
from v41.lowering.templates.attention.form import KIND, form_of
from v41.lowering.templates.attention.keys import places
from v41.regions import region_of, regions

SLOTS, ENTRIES = 3, 90
MODEL = Spelling(window=20, picked=70, heads=5, width=64, rotary=16)  # blocks of both kinds, a last one not full
CASES = (
    Lying(MODEL),
    Lying(MODEL, picked="rows"),
    Lying(MODEL, window="rows", places="clamped twice"),
    Lying(Spelling(records="mxfp4", rope="none", picked=17, window=2, width=64), window="slots"),
    Lying(Spelling(records="window", rope="none", picked=3, window=33, width=64)),  # numbers as they are, in a cache
    Lying(Spelling(records="none", picked=None, heads=1, window=5, width=64)),
)
QUICK = CASES[:1] + CASES[4:5]
SPREADS = (Spread(0, 8), Spread(16, stages=3), Spread(32, whole=False))


def drawn(case: Lying, rows: int, seed: int = 0) -> dict[str, Any]:
    """What a region that is handed records reads, by role, and what it would be that lies in caches."""
    s, generator = case.spelling, torch.Generator().manual_seed(seed)
    given: dict[str, Any] = by_role(piece(s), inputs_of(piece(s), s, rows, seed)) | {"size": rows}

    def below(least: int, most: int, *sizes: int) -> Tensor:
        return torch.randint(least, most, sizes, generator=generator)

    given |= {"slots": below(-SLOTS, SLOTS, rows)}  # from the end where they are negative, as in eager
    for branch, (name, source, entries) in enumerate(
        (("window", case.window, s.window + 3), ("picked", case.picked, ENTRIES))
    ):
        if name not in given or source == "rows":
            continue
        count = given[name].shape[1]
        places = below(-entries, entries, rows, count)
        if name == "picked":
            given["picks"] = torch.where(given["picks"] >= 0, below(0, entries, rows, count), -1)
            places = given["picks"].clamp(min=0)
        numbers = torch.randn(SLOTS * entries + rows, s.width, generator=generator).bfloat16()
        stored = s.stored(s.formats[branch], numbers)
        cache_, now = stored[rows:].unflatten(0, (SLOTS, entries)), stored[:rows]
        given |= {f"{name}_cache": cache_, f"{name}_places": places, f"{name}_records": now}
        given |= {f"{name}_rows": below(-rows, rows, rows, count), f"{name}_in_step": below(0, 2, rows, count) > 0}
    return given


def handed(case: Lying, given: dict[str, Any]) -> list[Any]:
    """Inputs of the region that is handed records: gathered as eager does."""
    found = dict(given)
    for name, source in (("window", case.window), ("picked", case.picked)):
        if f"{name}_cache" in given:
            found[name] = given[f"{name}_cache"][given["slots"].unsqueeze(-1), given[f"{name}_places"]]
            if source == "step":
                now = given[f"{name}_records"][given[f"{name}_rows"]]
                found[name] = torch.where(given[f"{name}_in_step"].unsqueeze(-1), now, found[name])
    return arranged(piece(case.spelling), found)


def lying(case: Lying, given: dict[str, Any]) -> list[Any]:
    """Inputs of the region that reads caches."""
    found = given | {name.removesuffix("_cache"): value for name, value in given.items() if name.endswith("_cache")}
    return arranged(lying_piece(case), found)


def arranged(body: GraphModule, given: dict[str, Any]) -> list[Any]:
    """In the order of its placeholders, a cache of any size."""
    (call,) = regions(body, KIND)
    roles = dict(zip(call.args[2:], region_of(call).attrs["operands"], strict=True))
    lies = [name.removesuffix("_cache") for name in given if name.endswith("_cache")]

    def one(node: Any) -> Any:
        role = roles.get(node, "size")
        alone = role in lies and given[role] is given.get(f"{role}_cache")
        return given[role].contiguous() if alone else fitted(given[role], node.meta["val"])

    return [one(node) for node in body.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
    ids=[f"{case.window}, {case.picked}, {case.spelling.records}" for case in CASES],
)
def test_it_has_the_bits_of_one_that_is_handed_its_records(interpreter: Interpreter, case: Lying) -> None:
    given = drawn(case, 3)
    for spread in SPREADS:
        (wanted,) = interpret(interpreter, kernel_of(case.spelling), handed(case, given), spread)
        (found,) = interpret(interpreter, lying_kernel(case), lying(case, given), spread)
        assert torch.equal(found, wanted) and found.any()


def test_what_nobody_reads_may_hold_anything(interpreter: Interpreter) -> None:
    """Records in which every byte is NaN, wherever no key that is seen lies: in slots of nobody, behind picks of -1,
    of this step where the ring is read."""
    case = CASES[0]
    given = drawn(case, 3)
    (before,) = interpret(interpreter, lying_kernel(case), lying(case, given), SPREADS[1])
    dirty = dict(given)
    slots = (given["slots"] % SLOTS).unsqueeze(-1)
    for name, seen in (("window", given["visible"] & ~given["window_in_step"]), ("picked", given["picks"] >= 0)):
        stored, places = given[f"{name}_cache"], given[f"{name}_places"]
        read = torch.zeros(stored.shape[:2], dtype=torch.bool)
        read[slots.expand_as(places)[seen], places[seen]] = True
        assert 0 < read.sum() < read.numel() // 2
        dirty[f"{name}_cache"] = torch.where(read.unsqueeze(-1), stored, 255)
    now = torch.zeros(3, dtype=torch.bool)
    now[given["window_rows"][given["visible"] & given["window_in_step"]]] = True
    dirty["window_records"] = torch.where(now.unsqueeze(-1), given["window_records"], 255)
    (after,) = interpret(interpreter, lying_kernel(case), lying(case, dirty), SPREADS[1])
    assert torch.equal(before, after)


def test_a_cache_may_be_of_any_size(interpreter: Interpreter, tmp_path: Path) -> None:
    """Numbers of records, and what is computed of them, have 64 bits: no cache of 2 GiB is made for it."""
    call = next(regions(lying_piece(CASES[0]), KIND))
    branch = form_of(call).branches[1]
    count, slots, entries = branch.count, 8000, 1 << 20
    told = f"""

@triton.jit
def told({places(branch)}, out, KEYS: tl.constexpr):
    at, seen = {branch.name}_at({places(branch)}, 0, 0, KEYS)
    tl.store(out + tl.arange(0, KEYS), at * {branch.bytes})
"""
    (tmp_path / "told.py").write_text(lying_kernel(CASES[0]).source + told)
    picks = torch.arange(entries - count, entries).reshape(1, count)
    out = torch.zeros(64, dtype=torch.int64)
    arguments = {"picks": picks, "slots": torch.tensor([7000]), "picked_slots": slots, "picked_entries": entries}
    given = [arguments[name] for name in places(branch).split(", ")]
    *_, found = interpreter.launch(tmp_path / "told.py", "told", (1,), *given, out, KEYS=64)
    assert torch.equal(found, (7000 * entries + picks[0, :64]) * branch.bytes) and found.min() > 1 << 31
