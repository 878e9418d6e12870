"""Long rows in runs: no lane is padded, the runs of an axis are folded into one tile, and results are as they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.lowering.rowwise.draws import Body, short_bodies
from tests.lowering.rowwise.running import check_everywhere
from tests.lowering.rowwise.test_held import QUIET, check_drawn, held
from tests.triton_interpreter import Interpreter
from v41.lowering.rowwise import hold
from v41.lowering.rowwise.held import read, values
from v41.model_def.quantization import fake_quant_fp8
from v41.tools.bench.rowwise_cases import CASES

RUNS = "runs      up to {} of an axis"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes of 64 elements are long."""
    monkeypatch.setattr(values, "LONG", 64)


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.usefixtures("short")
def test_an_axis_of_five_runs_is_five_tiles_and_one_fold(interpreter: Interpreter) -> None:
    body, kernel = held(normed, [torch.randn(7, 320)])
    assert RUNS.format(5) in kernel.source and kernel.elements == 320
    text = kernel.source.split("@triton.jit")[-1]
    assert text.count("tl.load(") == text.count("tl.store(") == 5
    assert text.count("tl.sum(") == 1 and "_there" not in text, "a tile is padded"
    check_everywhere(interpreter, body, kernel)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("width", [63, 64, 256, 11 * 64])
def test_short_axes_powers_of_two_and_many_runs_are_one_tile(interpreter: Interpreter, width: int) -> None:
    body, kernel = held(normed, [torch.randn(7, width)])
    assert "runs  " not in kernel.source and kernel.source.count("tl.store(") == 1
    assert kernel.elements == 1 << (width - 1).bit_length()
    check_everywhere(interpreter, body, kernel)


@pytest.mark.usefixtures("short")
def test_groups_within_a_run_stay_its_lanes(interpreter: Interpreter) -> None:
    body, kernel = held(lambda x: fake_quant_fp8(normed(x)), [torch.randn(7, 288).bfloat16()])
    assert RUNS.format(9) in kernel.source and kernel.source.count("ordered(tl.max(") == 9
    check_everywhere(interpreter, body, kernel)


@pytest.mark.usefixtures("short")
def test_groups_may_lie_across_runs(interpreter: Interpreter) -> None:
    """Of 80, in runs of 64: which group an element is in is divided for."""

    def grouped(x: Tensor) -> Tensor:
        groups = x.view(-1, 4, 80)
        return (groups * groups.amax(-1, keepdim=True)).view(-1, 320)

    body, kernel = held(grouped, [torch.randn(7, 320)])
    assert RUNS.format(5) in kernel.source
    check_everywhere(interpreter, body, kernel)


@pytest.mark.usefixtures("short")
def test_results_side_by_side_of_several_dtypes(interpreter: Interpreter) -> None:
    def several(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = normed(x.float())
        return torch.cat((y, x.float()[:, :96]), 1), (y * w).bfloat16(), y.amax(-1), (y > 0).sum(-1)

    body, kernel = held(several, [torch.randn(7, 192).bfloat16()], [torch.randn(192)])
    assert RUNS.format(3) in kernel.source
    check_everywhere(interpreter, body, kernel)


@pytest.mark.usefixtures("short")
def test_all_runs_count_for_what_a_program_holds(interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 x 320 are too many at once, though a tile of 4 x 64 is not: each program has one of the four."""
    monkeypatch.setattr(values, "LARGEST", 1024)
    body, kernel = held(normed, [torch.randn(7, 4, 320)])
    assert kernel.parts == 4 and kernel.elements == 320 and RUNS.format(5) in kernel.source
    check_everywhere(interpreter, body, kernel)


@pytest.mark.usefixtures("short")
def test_a_long_axis_beside_a_large_tile_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs count for all tiles, as which tiles are there at once is not known: 5 times 16 x 16 would be too many."""
    monkeypatch.setattr(values, "LARGEST", 1024)

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        torch._check(x.shape[0] == y.shape[0])
        return normed(x), y * y.amax((1, 2), keepdim=True)

    _, kernel = held(both, [torch.randn(7, 320), torch.randn(7, 16, 16)])
    assert "runs  " not in kernel.source and kernel.elements == 512


@pytest.mark.usefixtures("short")
def test_what_runs_would_make_too_long_a_text_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cut = held(normed, [torch.randn(7, 320)])
    monkeypatch.setattr(read, "SPELLED", 20)
    _, whole = held(normed, [torch.randn(7, 320)])
    assert RUNS.format(5) in cut.source and "runs  " not in whole.source


def check_shares(interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    """Drawn bodies hold to the contract with axes of 16 elements cut, and enough of them are."""
    monkeypatch.setattr(values, "LONG", 16)
    cut: list[bool] = []
    made = hold

    def counted(*given: object) -> object:
        kernel = made(*given)  # type: ignore[arg-type]
        cut.append("runs  " in kernel.source)
        return kernel

    monkeypatch.setattr("tests.lowering.rowwise.test_held.hold", counted)

    @settings(max_examples=examples, **QUIET)
    @given(short_bodies())
    def draw(drawn: Body) -> None:
        check_drawn(interpreter, drawn)

    draw()
    assert 0.2 <= sum(cut) / len(cut) <= 0.9


@pytest.mark.slow
def test_many_drawn_bodies_in_runs(interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    check_shares(interpreter, monkeypatch, 60)


@pytest.mark.parametrize(("name", "elements", "warps"), [
    ("norm", 5120, 8), ("norm_quantise", 1280, 4), ("swiglu_quantise", 2304, 8), ("stream_gate", 5120, 8),
    ("norm_rope_fp8", 512, 2),
])  # fmt: skip
def test_released_widths_are_held_without_padding(name: str, elements: int, warps: int) -> None:
    kernel = hold(CASES[name].body())
    assert (kernel.elements, kernel.warps(1)) == (elements, warps)
    assert ("runs  " in kernel.source) == (elements & (elements - 1) > 0)
