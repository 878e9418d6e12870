"""What lives between pieces is counted once, for as long as anybody uses it, and never what belongs to the caller."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.fx import Graph, GraphModule

from tests.tools.printed import printed
from tests.tools.small_models import WIDTH, run_of_balanced
from v41.plan import Buffer, Piece, Plan
from v41.tools.cli import main
from v41.tools.memory_command import (
    BARS,
    MIB,
    PLAIN,
    Memory,
    bars_in,
    curve_lines,
    fewer,
    fullest_table,
    memory_of,
    pools_table,
    show,
    sparkline,
)
from v41.tools.run_folder import save
from v41.tools.steps import Step

NAMES = ("first", "second", "third")


def piece(name: str, *, writes: tuple[str, ...] = ()) -> Piece:
    return Piece(name, (), (), (), writes, "start of the graph", name * 2, "model.py:1", 1, GraphModule({}, Graph()))


def buffer(name: str, owner: str, born: int, dies: int, size: str, views: tuple[str, ...] = ()) -> Buffer:
    return Buffer(name, f"u8[{size}]", owner, born, dies, size, views)


def plan(*buffers: Buffer) -> Plan:
    pieces = (piece("first"), piece("second", writes=("cache",)), piece("third"))
    return Plan((), (), {}, pieces, {"u0": "rows"}, buffers={each.name: each for each in buffers})


EXAMPLE = plan(
    buffer("weight", "caller", -1, 3, "4096"),
    buffer("cache", "caller", -1, 3, "512"),
    buffer("tokens", "runtime", -1, 0, "8*u0"),
    buffer("a", "first", 0, 1, "100*u0"),
    buffer("view of a", "first", 0, 1, "100*u0", ("a",)),
    buffer("b", "second", 1, 2, "30*u0"),
    buffer("c", "third", 2, 3, "7"),  # returned
)


def of(rows: int, made: Plan = EXAMPLE) -> Memory:
    return memory_of(made, Step(f"{rows} rows", {"rows": rows}, {"u0": rows}))


@given(st.integers(1, 10**6))
def test_memory_counts_once_while_it_is_used(rows: int) -> None:
    memory = of(rows)
    assert memory.curve == (100 * rows, 130 * rows, 30 * rows + 7)
    assert (memory.peak, memory.at) == (130 * rows, 1)
    assert (memory.read_only, memory.written, memory.copied) == (4096, 512, 8 * rows)
    assert [(each.name, size) for each, size in memory.fullest] == [("a", 100 * rows), ("b", 30 * rows)]


owned = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 999)).filter(lambda it: it[0] <= it[1])


@given(st.lists(owned, max_size=8))
def test_the_curve_is_what_a_run_would_hold(lives: list[tuple[int, int, int]]) -> None:
    """Against a run that allocates as pieces make, and frees behind the last that uses."""
    made = plan(*(buffer(f"v{i}", NAMES[born], born, dies, str(size)) for i, (born, dies, size) in enumerate(lives)))
    held, curve = 0, []
    for at in range(3):
        held += sum(size for born, _, size in lives if born == at)
        curve.append(held)
        held -= sum(size for _, dies, size in lives if dies == at)
    assert of(1, made).curve == tuple(curve)


def test_a_plan_without_pieces_holds_nothing() -> None:
    memory = of(3, Plan((), (), {}, ()))
    assert (memory.curve, memory.peak, memory.fullest, sparkline(memory.curve)) == ((), 0, (), "")


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=500))
def test_a_line_of_bars_shows_the_fullest_and_fits(curve: list[int]) -> None:
    line = sparkline(curve, 40)
    assert len(line) <= 40 and set(line) <= set(BARS)
    run = -(-len(curve) // 40)
    assert line[curve.index(max(curve)) // run] == (BARS[-1] if max(curve) else BARS[0])


def test_where_bars_cannot_be_printed_letters_stand_for_them() -> None:
    curve = [0, 3, 9, 4]
    plain = sparkline(curve, bars=bars_in("ascii"))
    assert (bars_in("utf-8"), bars_in("ascii"), bars_in("latin-1")) == (BARS, PLAIN, PLAIN) and plain.isascii()
    assert [PLAIN.index(letter) for letter in plain] == [BARS.index(letter) for letter in sparkline(curve)]


def test_the_table_of_what_lives_at_the_peak() -> None:
    assert printed(fullest_table(EXAMPLE, of(2**20))) == """\
value  spec        born    dies    MiB
a      u8[100*u0]  first   second  100
b      u8[30*u0]   second  third    30""".splitlines()


def test_a_large_peak_is_told_without_a_power_of_ten() -> None:
    (line,) = curve_lines(EXAMPLE, of(12 * 2**20))
    assert line.endswith("  at most 1560 MiB, while second runs")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run_of_balanced(), tmp_path / "run")
    assert main(["memory", str(tmp_path / "run"), "--tokens", "64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (step,) = told["steps"]
    weights = 2 * WIDTH * WIDTH * 4
    assert (told["schema"], step["read_only"], step["copied"]) == ("v41.memory.1", weights, 64 * WIDTH * 4)
    assert step["curve"][-1] == step["peak"] == 64 * WIDTH * 4 and told["pools"] == []
    assert main(["memory", str(tmp_path / "run"), "--tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "at most 0.00195 MiB, while piece_1 runs" in out and all(len(line) <= 100 for line in out.splitlines())


def pool(rows: int, peak: int) -> Memory:
    return Memory(Step(f"{rows} rows", {"rows": rows}, {}), 0, 0, 0, (peak,), ())


@given(st.lists(st.integers(1, 256), min_size=1, unique=True).map(sorted), st.data())
def test_of_many_rungs_a_few_are_told_with_what_all_below_them_take(rungs: list[int], data: st.DataObject) -> None:
    pools = [pool(rows, data.draw(st.integers(0, 9)) * MIB) for rows in rungs]
    shown = fewer(pools)
    told = [each.step.sizes["rows"] for each in shown]
    assert len(shown) <= 6 and (told[0], told[-1]) == (rungs[0], rungs[-1]) and set(told) <= set(rungs)
    lines = [line.split() for line in printed(pools_table(shown, pools))[1:]]
    most = [max(each.peak for each in pools if each.step.sizes["rows"] <= rows) // MIB for rows in told]
    assert [(int(rows), int(mib)) for rows, *_, mib in lines] == list(zip(told, most, strict=True))


def test_of_a_program_without_a_size_that_changes_one_step_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Memory(Step(f"{rows} rows", {}, {}), 0, 0, 0, (), ()) for rows in (16, 4096)]
    run = SimpleNamespace(plan=EXAMPLE)
    show(Console(width=100), run, found, [])  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert out.count("every step, since no size of this program changes") == 1 and "4096" not in out
