"""past_guards: results are the compiled model's, and whatever a graph rests on sends a changed call back through it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked

import v41
from tests.cpu_graphs import CpuGraphs, record_captures
from v41.runtime import past_guards
from v41.runtime.past_guards import PastGuards, paths, reader

WIDTH = 4


@dataclass(frozen=True)
class Rows:
    x: Tensor
    more: dict[int, Tensor]
    scale: int
    note: object = None  # nobody reads it


@dataclass(frozen=True)
class Shift:
    by: int


@dataclass(frozen=True)
class State:
    slots: int
    sums: tuple[Tensor, ...]
    shift: Shift = Shift(0)  # no tensor: known by the state that holds it alone


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, rows: Rows, state: State) -> Tensor:
        h = self.inner(rows.x) * rows.scale + self.shift * (2 if self.training else 1)
        for extra in rows.more.values():
            h = h + extra.unsqueeze(-1)
        state.sums[0].add_(h.sum())
        return h + state.sums[0] + state.slots + state.shift.by


def rows(n: int, scale: int = 3, dtype: torch.dtype = torch.float32, extras: int = 1) -> Rows:
    made = Rows(torch.randn(n, WIDTH, dtype=dtype), {i: torch.randn(n) for i in range(extras)}, scale, object())
    for tensor in (made.x, *made.more.values()):
        mark_unbacked(tensor, 0, shape_id="rows")
    return made


class Calls:
    """The compiled model, the eager one and the callable under test, each with a state of its own."""

    def __init__(self, graphs: list[CpuGraphs]) -> None:
        torch.manual_seed(0)
        self.graphs = graphs
        self.model = Model().eval()
        self.compiled = torch.compile(self.model, backend="v41", fullgraph=True)
        self.slow = 0
        self.step = PastGuards(self.compiled)
        self.step.compiled = self.count
        self.states = [State(1, (torch.zeros(()),)) for _ in range(2)]

    def count(self, *args: Any) -> Any:
        self.slow += 1
        return self.compiled(*args)

    def __call__(self, given: Rows) -> int:
        """One step; how many calls of the compiled model it took."""
        before = self.slow
        ours, theirs = self.step(given, self.states[0]), self.model(given, self.states[1])
        assert torch.equal(ours, theirs)
        assert torch.equal(self.states[0].sums[0], self.states[1].sums[0])
        return self.slow - before


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    torch.compiler.reset()
    with torch.no_grad():
        yield Calls(record_captures(monkeypatch))


def test_a_size_goes_past_the_guards_once_its_graph_was_replayed(calls: Calls) -> None:
    with v41.collect() as reports:
        taken = [calls(rows(n)) for n in (2, 2, 2, 2, 4, 4, 4, 2, 3, 3, 4)]
    assert taken == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0]  # 3 is in no bucket
    assert len(reports) == 1 and reports[0].captures is not None and reports[0].captures.replays == 7
    before = reports[0].captures.host_ns
    assert calls(rows(2)) == 0 and reports[0].captures.host_ns > before


def test_the_parts_of_a_step_make_a_step(calls: Calls) -> None:
    given = rows(2)
    assert calls.step.parts(given, calls.states[0]) == {}
    assert [calls(rows(2)) for _ in range(3)] == [1, 1, 0]
    parts = calls.step.parts(given, calls.states[0])
    leaves, _ = parts["read"]()  # type: ignore[misc]
    assert leaves[0] is given.x and parts["compare"]() is True
    parts["copy_in"]()
    parts["replay"]()
    assert torch.equal(parts["copy_out"]()[0], calls.model(given, calls.states[1]))  # type: ignore[index]
    assert calls.step.parts(rows(4), calls.states[0]) == {}


def replaced(model: Model) -> None:
    model.inner.weight = nn.Parameter(2 * model.inner.weight)


def moved(model: Model) -> None:
    model.inner.weight.data = 2 * model.inner.weight


def new_layer(model: Model) -> None:
    model.inner = nn.Linear(WIDTH, WIDTH)


def new_buffer(model: Model) -> None:
    model.shift = torch.full((WIDTH,), 5.0)


def loaded(model: Model) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


CHANGES: dict[str, Callable[[Calls], Any]] = {
    "a parameter is replaced": lambda calls: replaced(calls.model),
    "a parameter's memory is": lambda calls: moved(calls.model),
    "a layer is": lambda calls: new_layer(calls.model),
    "a buffer is": lambda calls: new_buffer(calls.model),
    "weights are loaded": lambda calls: loaded(calls.model),
    "training": lambda calls: calls.model.train(),
    "another state": lambda calls: [calls.states.__setitem__(i, State(7, (torch.full((), 9.0),))) for i in range(2)],
    "another state of the same tensors": lambda calls: [
        calls.states.__setitem__(i, replace(state, shift=Shift(5))) for i, state in enumerate(calls.states)
    ],
    "a capture by the caller": lambda calls: setattr(calls.graphs[0], "around", True),
    "forget": lambda calls: calls.step.forget(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(calls: Calls, change: str) -> None:
    assert [calls(rows(2)) for _ in range(3)] == [1, 1, 0]
    CHANGES[change](calls)
    assert calls(rows(2)) == 1
    assert calls(rows(2)) <= 1 and calls(rows(2)) <= 1


@pytest.mark.parametrize(
    "other", [rows(2, scale=4), rows(2, dtype=torch.float64), rows(2, extras=2)], ids=["number", "dtype", "container"]
)
def test_another_argument_is_seen(calls: Calls, other: Rows) -> None:
    assert [calls(rows(2)) for _ in range(3)] == [1, 1, 0]
    if other.x.dtype == torch.float64:
        with pytest.raises(RuntimeError):
            calls(other)
        assert calls.slow == 3
    else:
        assert calls(other) == 1
    assert calls(rows(2)) <= 1  # what was learned of the other shape may have taken its place


class Unit(Enum):
    RADIAN = 1.0
    DEGREE = 57.0


def scaled(given: Any) -> Tensor:
    x, factor = given["x"], given["by"]
    while isinstance(factor, (tuple, list, dict)):
        factor = factor[0]
    if isinstance(factor, Unit):
        factor = factor.value
    return x.to(factor) if isinstance(factor, torch.dtype) else x * factor


PAIRS: dict[str, tuple[Any, Any]] = {
    "types of numbers": (2, 2.0),
    "bools": (1, True),
    "numbers in a tuple": ((2,), (3,)),
    "numbers in a dict": ({0: 2}, {0: 3}),
    "containers": ((2,), [2]),
    "dtypes": (torch.float16, torch.bfloat16),
    "enums": (Unit.RADIAN, Unit.DEGREE),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_lies_beside_a_tensor_is_seen(monkeypatch: pytest.MonkeyPatch, pair: str) -> None:
    record_captures(monkeypatch)
    torch.compiler.reset()
    step = PastGuards(torch.compile(scaled, backend="v41", fullgraph=True))
    with torch.no_grad():
        for by in [*[PAIRS[pair][0]] * 4, *[PAIRS[pair][1]] * 4, PAIRS[pair][0]]:
            x = torch.arange(1, 5)
            mark_unbacked(x, 0, shape_id="rows")
            given = {Unit.RADIAN: None, "x": x, "by": by}
            torch.testing.assert_close(step(given), scaled(given), rtol=0, atol=0)
    assert step.routes, "some of them were graphs"


def test_a_list_changed_in_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    record_captures(monkeypatch)
    torch.compiler.reset()
    step, factors = PastGuards(torch.compile(lambda x, by: x * by[0], backend="v41", fullgraph=True)), [2]
    with torch.no_grad():
        for factors[0] in (2, 2, 2, 2, 3):
            x = torch.ones(4)
            mark_unbacked(x, 0, shape_id="rows")
            assert step(x, factors)[0] == factors[0]


@pytest.mark.parametrize("twice", [lambda x: x, lambda x: x.detach()], ids=["one tensor", "one memory"])
def test_two_that_were_one_are_seen(monkeypatch: pytest.MonkeyPatch, twice: Callable[[Tensor], Tensor]) -> None:
    record_captures(monkeypatch)
    torch.compiler.reset()
    step = PastGuards(torch.compile(lambda pair: pair[0] * 2 + pair[1], backend="v41", fullgraph=True))
    with torch.no_grad():
        for two in (False, False, False, True, True, True, False):
            x = torch.arange(4.0)
            y = x + 5 if two else twice(x)
            for tensor in (x, y):
                mark_unbacked(tensor, 0, shape_id="rows")
            assert torch.equal(step((x, y)), x * 2 + y)
    assert step.routes, "two that are two have a graph"


def test_routes_of_numbers_that_never_come_again_are_dropped(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_guards, "MOST", 2)
    for n in (1, 2, 4, 8):
        assert [calls(rows(n)) for _ in range(3)] == [1, 1, 0]
        assert len(calls.step.routes) <= 2


def test_weights_changed_in_place_are_read(calls: Calls) -> None:
    assert [calls(rows(2)) for _ in range(3)] == [1, 1, 0]
    calls.model.inner.weight.mul_(3)
    assert calls(rows(2)) == 0


def test_other_modes_are_seen(calls: Calls) -> None:
    assert [calls(rows(2)) for _ in range(3)] == [1, 1, 0]
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(rows(2)) == 1
    with torch.enable_grad(), pytest.raises(Exception, match="require gradients"):
        calls(rows(2))


def test_the_hooks_end_with_the_callable() -> None:
    from torch.nn.modules import module

    gc.collect()  # of tests before
    before = len(module._global_parameter_registration_hooks)
    step: PastGuards | None = v41.past_guards(torch.compile(Model(), backend="v41"))
    assert step is not None and len(module._global_parameter_registration_hooks) == before + 1
    step = None
    gc.collect()
    assert len(module._global_parameter_registration_hooks) == before


def test_a_reader_reads_tensors_and_tells_the_rest() -> None:
    given, state = rows(2), State(1, (torch.zeros(()),))
    read = reader((given, state))
    leaves, told = read((given, state))
    assert leaves[0] is given.x and leaves[1] is given.more[0] and leaves[2] is state.sums[0]
    assert paths(given, "b") == ["b.x", "b.more[0]"]
    assert read((replace(given, note=1), state))[1] == told
    assert read((replace(given, scale=1), state))[1] != told
    assert read((given, replace(state, sums=(*state.sums, given.x))))[1] != told
    nan, zero, minus = (read_of(given, value) for value in (float("nan"), 0.0, -0.0))
    assert zero != minus and nan == read_of(given, float("nan"))


def read_of(*args: Any) -> tuple[Any, ...]:
    return reader(args)(args)[1]
