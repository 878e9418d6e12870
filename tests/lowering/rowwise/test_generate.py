"""Generated kernels, interpreted: right by the rounding contract, the same bits with every schedule, or refused with
a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.lowering.rowwise.boundaries import layer_norm, rms_norm, seam, seam_inputs
from tests.lowering.rowwise.running import SCHEDULES, check_contract, check_everywhere, generated, interpret
from tests.strategies.tracing import trace
from tests.triton_interpreter import Interpreter
from v41.errors import KernelsNotWritten
from v41.lowering.rowwise import Kernel, Unsupported, generate, pass_over
from v41.lowering.rowwise.read import NotRowwise
from v41.passes.same_values import random_inputs
from v41.tools.bench.rowwise_cases import seams

ROWWISE = Path(__file__).parents[3] / "lowering" / "rowwise"


@pytest.mark.parametrize(
    ("streams", "width", "norm", "iters", "extra"),
    [
        (4, 128, rms_norm, 20, False),
        (3, 128, rms_norm, 7, False),
        (4, 96, layer_norm, 5, False),
        (2, 64, rms_norm, 4, True),
    ],
    ids=["as-is", "three-streams-seven-iterations", "layer-norm", "extra-output"],
)
def test_boundary(
    interpreter: Interpreter, streams: int, width: int, norm: Callable[..., Tensor], iters: int, extra: bool
) -> None:
    body, kernel = generated(seam(norm, iters, extra), *seam_inputs(streams, width))
    check_everywhere(interpreter, body, kernel)


@pytest.mark.parametrize("name", ["three_streams", "layer_norm", "extra_output"])
def test_what_nobody_tuned_for_becomes_a_kernel(interpreter: Interpreter, name: str) -> None:
    """As `v41 bench rowwise` captures it."""
    case = seams(80)[name]
    kernel = generate(case.body(), name)
    assert isinstance(kernel, Kernel), kernel
    inputs = case.inputs(24, "cpu")
    check_contract(case.body(), inputs, interpret(interpreter, kernel, inputs))


def test_rows_do_not_touch_each_other(interpreter: Interpreter) -> None:
    body, kernel = generated(seam(rms_norm, 4), *seam_inputs(2, 64))
    inputs = random_inputs(body, 6)
    whole = interpret(interpreter, kernel, inputs)
    per_row = [what is not None and what.per_row for what in kernel.inputs]
    alone = [arg[2:3].contiguous() if rows else arg for arg, rows in zip(inputs, per_row, strict=True)]
    for a, b in zip(interpret(interpreter, kernel, alone), whole, strict=True):
        assert torch.equal(a, b[2:3])
    dirty = [
        arg.index_fill(0, torch.tensor(3), float("nan")) if rows else arg
        for arg, rows in zip(inputs, per_row, strict=True)
    ]
    for schedule in SCHEDULES:
        results = interpret(interpreter, kernel, dirty, schedule)
        keep = torch.arange(6) != 3
        assert all(torch.equal(a[keep], b[keep]) for a, b in zip(results, whole, strict=True))
        assert all(a[3].isnan().all() for a in results)


def test_no_rows_launch_nothing() -> None:
    body, kernel = generated(rms_norm, [torch.randn(7, 64)], [torch.randn(64)])
    (result,) = kernel.launch(*random_inputs(body, 0))  # would fail without a GPU if it launched
    assert result.shape == (0, 64)


def test_rounding_points_are_kept(interpreter: Interpreter) -> None:
    def chain(x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = (x * 3).to(torch.bfloat16)
        return rounded.float() * 5, (rounded + rounded * 0.3).float().half()

    body, kernel = generated(chain, [torch.randn(7, 100)])
    inputs = random_inputs(body, 5)
    for ours, eager in zip(interpret(interpreter, kernel, inputs), body(*inputs), strict=True):
        assert torch.equal(ours, eager)


def test_spills_survive_the_outputs_they_lie_in(interpreter: Interpreter) -> None:
    def softmax_of_sums(x: Tensor, a: Tensor) -> Tensor:
        return ((a[:, :, None] * a[:, None])[..., None] * x[:, :, None]).sum(1).softmax(-1)

    body, kernel = generated(softmax_of_sums, [torch.randn(7, 3, 96), torch.randn(7, 3)])
    check_everywhere(interpreter, body, kernel)


def test_text_does_not_grow_with_iterations() -> None:
    lengths = {
        iters: len(generated(seam(rms_norm, iters), *seam_inputs(3, 64))[1].source.splitlines()) for iters in (8, 30)
    }
    assert abs(lengths[8] - lengths[30]) < 5


def test_a_spilled_tile_lies_in_the_output_that_replaces_it() -> None:
    _, kernel = generated(seam(rms_norm, 4), *seam_inputs(2, 64))
    assert kernel.scratch == []
    _, kernel = generated(seam(layer_norm, 4, extra=True), *seam_inputs(2, 64))
    assert kernel.scratch == []  # the collapsed row is an output itself


@pytest.mark.parametrize(
    ("fn", "shapes", "reason"),
    [
        (lambda x: x.cumsum(-1), [(7, 64)], "does not know"),
        (lambda x: x.flip(0), [(7, 64)], "does not know"),
        (lambda x: x - x.sum(0, keepdim=True), [(7, 64)], "folds the row axis"),
        (lambda x: x.unflatten(1, (2, 48)).sum(1), [(7, 96)], "cuts the row axis or the wide axis"),
        (lambda x: x.double() * 2, [(7, 64)], "float64"),
        (lambda x: x**2.5, [(7, 64)], "power 2.5"),
        (lambda x: x[:, 3:40], [(7, 64)], "picks part"),
    ],
    ids=["scan", "moves-rows", "mixes-rows", "cuts-wide-axis", "fp64", "odd-power", "odd-slice"],
)
def test_refuses_with_a_reason(fn: Callable[..., Tensor], shapes: list[tuple[int, ...]], reason: str) -> None:
    with pytest.raises(NotRowwise, match=reason):
        pass_over(trace(fn, *(torch.randn(shape) for shape in shapes), backed=True))


def test_rows_of_two_numbers_are_refused() -> None:
    pair = trace(lambda x, y: (x * 2, y * 2), torch.randn(7, 64), torch.randn(9, 64), backed=True)
    with pytest.raises(NotRowwise, match="rows beside others"):
        pass_over(pair)
    refusal = generate(pair)
    assert isinstance(refusal, Unsupported) and "elements beside" in refusal.reason, refusal


def test_a_body_without_rows_is_refused() -> None:
    refusal = generate(trace(lambda x: x * 2, static=[torch.randn(3, 8)]))
    assert isinstance(refusal, Unsupported) and "no rows" in refusal.reason, refusal


def test_a_gemm_is_refused() -> None:
    with pytest.raises(NotRowwise, match="GEMM"):
        pass_over(trace(lambda x, w: x @ w, torch.randn(7, 128), static=[torch.randn(128, 100)], backed=True))


@pytest.mark.parametrize("home", ["/proc/nowhere", None])
def test_a_kernel_that_cannot_be_kept_says_where_it_can(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobodys() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobodys if home is None else lambda: Path(home))
    kernel = generate(seams()["layer_norm"].body(), "layer_norm")
    assert isinstance(kernel, Kernel)
    with pytest.raises(KernelsNotWritten, match="set XDG_CACHE_HOME to a folder that you may write to") as raised:
        kernel.module  # noqa: B018
    said = "Could not determine home directory." if home is None else "No such file or directory"
    assert str(raised.value.facts["problem"]).endswith(said)


def test_generator_names_no_concept_of_the_model() -> None:
    words = ("mhc", "sinkhorn", "expert", "indexer", "engram", "latent", "compressor", "collapse", "boundary")
    found = [(path.name, word) for path in ROWWISE.rglob("*.py") for word in words if word in path.read_text().lower()]
    assert found == []
