"""backend="v41" runs any inference graph as eager does: values, aliases, writes; what it refuses, it names."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import v41
from tests.strategies.tracing import trace
from v41 import backend, codegen
from v41.errors import (
    CodegenHasNoDevice,
    GradientsRequested,
    InvalidOptionValue,
    ModeRefused,
    PassFailed,
    UnknownOption,
)
from v41.lowering.generated import GeneratedPiece
from v41.lowering.inductor import supported
from v41.options import Options
from v41.passes.partition import partition
from v41.passes.pipeline import PIPELINE, Pass, run_pipeline
from v41.passes.same_values import random_inputs
from v41.regions import outline
from v41.report import CompileReport, Decision, applied


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code from the test before, and no gradients unless a test asks for them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def compiled(function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="v41", options={"codegen": "eager", "verify": True}, **kwargs)


def copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)


def check(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[CompileReport]:
    """Compiled and eager agree, bit for bit, on results and on what the call left in its arguments."""
    ours, theirs = copies(args), copies(args)
    expected = function(*theirs, **kwargs)
    with v41.collect() as reports:
        result = compiled(function)(*ours, **kwargs)
    torch.testing.assert_close((result, ours), (expected, theirs), rtol=0, atol=0)
    assert reports
    assert all(not run.failure for report in reports for run in report.passes)
    return reports


def test_a_perceptron() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    (report,) = check(net, torch.randn(3, 8))
    assert (report.pieces, report.artifacts, report.graph_break, report.recompiles) == (1, 1, None, 0)
    assert report.options == {
        "codegen": ("eager", "options"),
        "verify": (True, "options"),
        "overlap": ("off", "auto: the program has no size called rows"),
        "capture": ("off", "auto: no CUDA graphs on cpu"),
    }


def test_a_convolution() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).eval()
    check(net, torch.randn(2, 3, 8, 8))


def test_a_transformer_layer() -> None:
    norms, qkv, out = [nn.LayerNorm(16) for _ in range(2)], nn.Linear(16, 48), nn.Linear(16, 16)
    ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def layer(x: Tensor) -> Tensor:  # [B, T, 16], two heads
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in qkv(norms[0](x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + out(y.transpose(1, 2).flatten(2))
        return x + ffn(norms[1](x))

    check(layer, torch.randn(2, 5, 16))


def test_activations_and_normalisations_keep_eager_bits() -> None:
    functional = nn.functional

    def many(x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        norm = functional.layer_norm(wide, (16,))
        return (
            functional.silu(x),
            functional.gelu(x),
            functional.softplus(wide),
            wide.softmax(-1),
            norm,
            wide.norm(dim=-1),
        )

    check(many, torch.randn(8, 16).bfloat16())


def test_int_arguments_and_keywords() -> None:
    check(lambda x, n, *, scale, bias=None: x.repeat(n) * scale, torch.randn(4), 3, scale=2)


def test_no_inputs() -> None:
    check(lambda: torch.arange(4) * 2)


def test_an_output_that_is_an_input_and_one_that_is_none() -> None:
    x = torch.randn(3)
    first, none, twice, again = compiled(lambda x: (x, None, x * 2, x))(x)
    assert first is x and again is x and none is None
    assert torch.equal(twice, x * 2)


def test_a_view_of_an_input_stays_a_view() -> None:
    x = torch.randn(4, 3)
    row, double = compiled(lambda x: (x[1], x[1] * 2))(x)
    x.zero_()
    assert row.count_nonzero() == 0 and double.count_nonzero() == 3


def test_the_same_result_twice_and_nested() -> None:
    def twins(x: Tensor) -> Any:
        y = x + 1
        return {"a": (y, y), "b": [y[0], (x * 2,)]}

    check(twins, torch.randn(3))


def test_a_constant_tensor() -> None:
    check(lambda x: x + torch.tensor([1.0, 2.0, 3.0]), torch.randn(3))


@pytest.mark.parametrize("offset", [0, 1])
def test_writes_to_inputs(offset: int) -> None:
    def step(cache: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        cache[slots + offset] = x * 2
        x.add_(1)
        return cache[offset : offset + 2].sum() + x

    check(step, torch.zeros(6, 3), torch.randn(2, 3), torch.tensor([1, 3]))


def test_two_inputs_that_share_memory() -> None:
    def both(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return b + 1

    ours, theirs = torch.arange(6.0), torch.arange(6.0)
    result, expected = compiled(both)(ours[:4], ours[2:]), both(theirs[:4], theirs[2:])
    assert torch.equal(result, expected) and torch.equal(ours, theirs)


def test_rows_of_any_number_compile_once() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu().sum(-1)

    function, w = compiled(step, fullgraph=True), torch.randn(4, 5)
    with v41.collect() as reports:
        for rows in (3, 0, 1, 2, 17):
            x = torch.randn(rows, 4)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            assert torch.equal(function(x, w), step(x, w)), rows
    assert len(reports) == 1


def test_automatic_dynamic_shapes_recompile_once_and_say_so() -> None:
    function = compiled(lambda x: x.sum(0) * x.shape[0])
    with v41.collect() as reports:
        for rows in (3, 4, 5, 6):
            x = torch.randn(rows, 2)
            assert torch.equal(function(x), x.sum(0) * rows)
    assert [report.recompiles for report in reports] == [0, 1]


def test_random_numbers_come_in_eager_order() -> None:
    def noise(x: Tensor) -> Tensor:
        return x + torch.rand(3), torch.rand(3)

    torch.manual_seed(5)
    expected = noise(torch.zeros(3))
    torch.manual_seed(5)
    result = compiled(noise)(torch.zeros(3))
    assert all(map(torch.equal, result, expected))


def test_a_graph_break_is_in_the_report() -> None:
    def halves(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    first, second = check(halves, torch.randn(3))
    assert first.graph_break is not None and "test_backend.py" in first.graph_break
    assert second.graph_break is None


def test_grouped_matmul_stays_whole() -> None:
    def experts(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, w, offs=ends)

    (report,) = check(
        experts,
        torch.randn(8, 16, dtype=torch.bfloat16),
        torch.randn(2, 16, 32, dtype=torch.bfloat16),
        torch.tensor([3, 8], dtype=torch.int32),
    )
    assert report.plan is not None
    targets = [str(node.target) for piece in report.plan.pieces for node in piece.body.graph.nodes]
    assert "aten._grouped_mm.default" in targets


def test_two_threads_compile() -> None:
    net = nn.Linear(4, 4)
    results: dict[int, bool] = {}

    def work(rows: int) -> None:
        with torch.no_grad():
            x = torch.randn(rows, 4)
            function = compiled(lambda x: net(x) * rows)
            results[rows] = torch.equal(function(x), net(x) * rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {2: True, 3: True}


def refusal(function: Callable[..., Any], *args: Any) -> Exception:
    """What the backend raised inside torch.compile's own error."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        function(*args)
    return caught.value.inner_exception


def test_gradients_are_refused_by_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.wq(x) + 1

    with torch.enable_grad():
        error = refusal(torch.compile(Model(), backend="v41"), torch.randn(2, 4))
    assert isinstance(error, GradientsRequested)
    assert error.facts == {"count": 2, "total": 3, "first": "wq.weight"}
    assert "torch.no_grad()" in str(error)


def test_a_function_that_turns_gradients_off_itself_compiles() -> None:
    net = nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            return net(x)

    x = torch.randn(2, 4)
    with torch.enable_grad():
        assert torch.equal(compiled(forward)(x), forward(x))


def test_a_function_that_turns_gradients_off_for_a_part_is_refused() -> None:
    net = nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = net(x)
        return net(y)

    with torch.enable_grad():
        assert isinstance(refusal(compiled(forward), torch.randn(2, 4)), GradientsRequested)


def test_inference_mode() -> None:
    net = nn.Linear(4, 4)
    with torch.inference_mode():
        x = torch.randn(2, 4)
        assert torch.equal(compiled(net)(x), net(x))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"options": {"codgen": "eager"}}, UnknownOption),
        ({"options": {"codegen": "cuda"}}, InvalidOptionValue),
        ({"options": {"overlap": ANY}}, InvalidOptionValue),  # equals all words, as arrays of numpy may
        ({"options": "eager"}, InvalidOptionValue),
        ({"options": {"codegen": "triton"}}, CodegenHasNoDevice),
        ({"options": {"verify": 1}}, InvalidOptionValue),
        ({"options": {"verify": "all"}}, InvalidOptionValue),
        ({"options": {"strict": "yes"}}, InvalidOptionValue),
        ({"mode": "reduce-overhead"}, ModeRefused),
    ],
)
def test_settings_that_do_not_exist_are_refused(settings: dict[str, Any], error: type[Exception]) -> None:
    found = refusal(torch.compile(lambda x: x + 1, backend="v41", **settings), torch.randn(2))
    assert isinstance(found, error)
    assert "fix  " in str(found)


def test_a_failing_pass_is_reported_or_strictly_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(gm: torch.fx.GraphModule) -> list[Decision]:
        raise KeyError("val")

    monkeypatch.setattr(backend, "run_pipeline", lambda gm, **given: run_pipeline(gm, [Pass(breaks)], **given))
    with v41.collect() as reports:
        assert torch.equal(compiled(lambda x: x + 1)(torch.ones(2)), torch.full((2,), 2.0))
    (report,) = reports
    assert str(report.passes[0].failure).startswith("KeyError")
    found = refusal(torch.compile(lambda x: x + 2, backend="v41", options={"strict": True}), torch.randn(2))
    assert isinstance(found, PassFailed) and "pass breaks raised KeyError" in str(found)


def test_values_are_compared_on_demand() -> None:
    """A program that writes a cache by an index, with rounding, casts and random numbers."""

    def step(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        cache[slots] = (x.bfloat16() * 3).float()
        return cache[slots].softmax(-1) + torch.rand(4)

    with v41.collect(programs=True) as reports:
        options = {"codegen": "eager", "verify": "numeric", "strict": True}
        cache = torch.zeros(5, 4)
        torch.compile(step, backend="v41", options=options)(torch.randn(2, 4), torch.tensor([3, 1]), cache)
    assert cache[3].abs().sum() > 0
    assert [(run.failure, run.warning) for run in reports[0].passes] == [(None, None)] * len(PIPELINE)
    assert reports[0].options["verify"] == ("numeric", "options")
    last = reports[0].passes[-1]
    assert last.changes and all(change.source for change in last.changes)


def test_the_name_is_registered_once_and_a_reload_is_harmless() -> None:
    assert "v41" in torch._dynamo.list_backends()
    first = torch._dynamo.lookup_backend("v41")
    importlib.reload(backend)
    assert torch._dynamo.lookup_backend("v41") is first
    assert torch.equal(compiled(lambda x: x + 1)(torch.ones(2)), torch.full((2,), 2.0))


def test_identical_layers_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut where a pass made regions, equal pieces share one artifact; here every relu is a region of its own."""

    def outline_relu(gm: torch.fx.GraphModule) -> list[Decision]:
        found = [node for node in gm.graph.nodes if node.target is torch.ops.aten.relu.default]
        return [applied(outline(gm, [node], kind="relu")) for node in found]

    def run_with_relus(gm: torch.fx.GraphModule, **settings: Any) -> Any:
        return run_pipeline(gm, [*PIPELINE, Pass(outline_relu)], **settings)

    monkeypatch.setattr(backend, "run_pipeline", run_with_relus)
    monkeypatch.setattr(backend, "CUT_AT", ("relu",))
    weights = [torch.randn(4, 4) for _ in range(5)]

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = (x @ w).relu()
        return x

    (report,) = check(layers, torch.randn(3, 4), *weights)
    assert (report.pieces, report.artifacts) == (10, 2)


def test_passes_compute_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd has a mode on in which tensors are fake; a pass that tries an expression needs real ones."""
    seen: list[float] = []

    def probe(gm: torch.fx.GraphModule) -> list[Decision]:
        seen.append(torch.arange(4.0).sum().item())
        return []

    monkeypatch.setattr(backend, "run_pipeline", lambda gm, **settings: run_pipeline(gm, [Pass(probe)], **settings))
    check(lambda x: x + 1, torch.randn(3))
    assert seen == [6.0]


def test_a_piece_that_inductor_cannot_compile_runs_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(body: torch.fx.GraphModule, name: str, **tiers: Any) -> Any:
        raise NotImplementedError("no such lowering\nwith a long story")

    monkeypatch.setattr("v41.lowering.inductor.compile_piece", fail)
    x = torch.randn(3)
    with v41.collect() as reports:
        result = torch.compile(lambda x: x * 2, backend="v41", options={"codegen": "inductor"})(x)
    assert torch.equal(result, x * 2)
    assert reports[0].fallbacks == ["piece_0 as eager: Inductor raised NotImplementedError: no such lowering"]


def test_auto_takes_eager_on_a_cpu_and_asks_what_another_device_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("v41.lowering.inductor.supported", lambda device: None)
    with v41.collect() as reports:
        assert torch.equal(torch.compile(torch.exp, backend="v41")(x := torch.randn(3)), x.exp())
    chosen, why = reports[0].options["codegen"]
    assert chosen == "eager" and 'codegen="inductor"' in why
    assert codegen.effective_codegen(Options(), torch.device("xpu")) == ("inductor", "auto")
    monkeypatch.setattr("v41.lowering.inductor.supported", lambda device: f"not on {device}")
    assert codegen.effective_codegen(Options(), torch.device("xpu")) == ("eager", "auto: not on xpu")


def roundings(x: Tensor, weight: Tensor) -> Tensor:
    """What a piece of the model holds and Inductor's own C++, or its decompositions, would round otherwise."""
    y = F.linear(x, weight).float()
    gate = F.silu(y) * F.softplus(y).sqrt()
    return gate * y.softmax(-1).to(x.dtype).float() + y.softmax(-1) + y.sigmoid()


def test_inductor_has_eagers_bits_on_a_cpu_and_says_where_it_cannot() -> None:
    weight, x = torch.randn(12, 20).bfloat16(), torch.randn(8, 20).bfloat16()
    supported.cache_clear()
    function = torch.compile(roundings, backend="v41", options={"codegen": "inductor"}, dynamic=True)
    with v41.collect() as reports:
        results = [(function(rows, weight), roundings(rows, weight)) for rows in (x, x[:3])]
    supported.cache_clear()
    reason = supported(torch.device("cpu"))  # asked inside of a compile, it said the same as here
    for found, expected in results:
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        assert reason or torch.equal(found, expected)
    (report,) = reports
    assert report.options["codegen"] == ("inductor", f"options, although {reason}" if reason else "options")
    assert not report.fallbacks


def region_body(fn: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> torch.fx.GraphModule:
    """The one piece of a graph that is a region from end to end, of a kind that becomes kernels."""
    monkeypatch.setattr(backend, "CUT_AT", ("any",))
    gm = trace(fn, torch.randn(7, 64))
    outline(gm, [node for node in gm.graph.nodes if node.op == "call_function"], kind="any")
    (piece,) = partition(gm, cut_at=("any",)).pieces
    return piece.body


def test_triton_takes_pieces_of_regions_and_the_report_names_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    body, report = region_body(lambda x: x.relu() * 2, monkeypatch), CompileReport()
    made = backend.artifact(body, ["piece_1", "piece_3"], ("triton", "eager"), report)
    assert isinstance(made, GeneratedPiece) and report.fallbacks == []
    assert report.kernels == {made.kernel.name: ["piece_1", "piece_3"]} and made.kernel.name.startswith("any_")


def test_a_refused_region_goes_the_next_way_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    body, report = region_body(lambda x: x.cumsum(-1), monkeypatch), CompileReport()
    made, inputs = backend.artifact(body, ["piece_1"], ("triton", "eager"), report), random_inputs(body, 3)
    (x,) = (value for value in inputs if isinstance(value, Tensor))
    assert torch.equal(made(*inputs)[0], x.cumsum(-1))
    assert report.kernels == {}
    (said,) = report.fallbacks
    assert said.startswith("piece_1 as eager: no kernel, since cumsum") and "does not know" in said


def test_pieces_between_regions_are_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    report = CompileReport()
    monkeypatch.setattr(backend, "CUT_AT", ("any",))
    backend.artifact(trace(lambda x: x + 1, torch.randn(7, 64)), ["piece_0"], ("triton", "eager"), report)
    assert (report.kernels, report.fallbacks) == ({}, [])


def test_auto_takes_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr("v41.lowering.inductor.supported", lambda device: None)
    assert codegen.effective_codegen(Options(), gpu) == ("triton", "auto; the rest through inductor")
    assert codegen.ways("triton", gpu) == ("triton", "inductor", "eager")
    monkeypatch.setattr("v41.lowering.inductor.supported", lambda device: "it rounds less")
    assert codegen.effective_codegen(Options("triton"), gpu) == ("triton", "options; the rest as eager: it rounds less")
    assert codegen.ways("triton", gpu) == ("triton", "eager")
    assert codegen.effective_codegen(Options("eager"), gpu)[0] == "eager"


def test_programs_are_in_the_report_on_demand() -> None:
    with v41.collect(programs=True) as reports:
        compiled(lambda x: x.relu() + 1)(torch.randn(3))
    (report,) = reports
    assert report.program is not None and "relu" in report.program
    assert all(run.program is not None for run in report.passes)
