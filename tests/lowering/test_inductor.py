"""compile_piece: alone and in a backend, with regions, symbolic rows, cache writes, and inputs that do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.counted import calls_of
from tests.strategies.tracing import trace
from v41._compat import inductor_keeps_explicit_casts
from v41._compat_trace import functional_aten
from v41.errors import PieceInputMismatch
from v41.lowering.inductor import cast_chain, compile_piece, supported
from v41.lowering.piece_inputs import checker
from v41.regions import invoke_subgraph, outline

CPU = torch.device("cpu")


def rows_of(count: int) -> tuple[int, Tensor, Tensor]:
    """What a traced function of two row tensors takes: the row symbol, then the tensors."""
    x, y = torch.randn(2, count, 48, generator=torch.Generator().manual_seed(count))
    return count, x, y


def mix(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x * y + 1
    return z / (z.abs() + 2), z.T


@pytest.fixture(scope="module")
def mixed() -> tuple[GraphModule, Callable[..., tuple[Any, ...]]]:
    gm = trace(mix, *rows_of(5)[1:])
    return gm, compile_piece(gm, "piece 3")


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 40])
def test_any_number_of_rows_without_a_new_compile(mixed: Any, count: int) -> None:
    gm, piece = mixed
    args = rows_of(count)
    found = piece(*args)
    assert isinstance(found, tuple) and equal(found, gm(*args))


def test_leaves_the_graph_as_it_was() -> None:
    gm = trace(mix, *rows_of(5)[1:])
    before, metas = str(gm.graph), [dict(node.meta) for node in gm.graph.nodes]
    compile_piece(gm)
    assert str(gm.graph) == before and [dict(node.meta) for node in gm.graph.nodes] == metas


FLAWS: dict[str, tuple[Callable[[int, Tensor, Tensor], tuple[Any, ...]], str]] = {
    "another dtype": (lambda n, x, y: (n, x.double(), y), "torch.float64 of shape"),
    "another width": (lambda n, x, y: (n, x, y[:, :40].contiguous()), r"shape \(5, 40\)"),
    "other strides": (lambda n, x, y: (n, x, y.T.contiguous().T), r"strides \(1, 5\)"),
    "rows that disagree": (lambda n, x, y: (n, x, torch.cat([y, y])), r"shape \(10, 48\)"),
    "an input too few": (lambda n, x, y: (n, x), "2 inputs"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_refuses_inputs_it_was_not_compiled_for(mixed: Any, flaw: str) -> None:
    change, words = FLAWS[flaw]
    with pytest.raises(PieceInputMismatch, match=words) as refusal:
        mixed[1](*change(*rows_of(5)))
    assert "piece 3" in str(refusal.value)


def test_strides_of_single_and_empty_dimensions_mean_nothing(mixed: Any) -> None:
    for count in (0, 1):
        n, x, y = rows_of(count)
        assert equal(mixed[1](n, x.as_strided(x.shape, (7, 1)), y), mixed[0](n, x, y))


def test_the_check_is_cheap() -> None:
    tensors = [torch.empty(4, 4) for _ in range(32)]
    check = checker("piece", [f"t{i}" for i in range(32)], tensors)
    assert calls_of(lambda: check(tensors)) <= 32 + 4  # one an input: 0.3 µs on an idle machine


def test_columns_of_unbacked_rows() -> None:
    """`x[:, :40]` slices its rows, too, from 0 to the end: not every torch lowers that over an unbacked size."""
    gm = trace(lambda x, y: x[:, :40] * 2 + y[:, 8:], *rows_of(5)[1:])
    args = rows_of(4)
    assert equal(compile_piece(gm)(*args), gm(*args))


def test_regions_are_inlined() -> None:
    gm = trace(mix, *rows_of(5)[1:])
    x = rows_of(3)
    inner = [node for node in gm.graph.nodes if node.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.abs.default)]
    inner.insert(1, inner[0].next)  # the sum between them
    call = outline(gm, inner, kind="part")
    outline(gm, [call], kind="whole")
    gm.recompile()
    assert any(node.target is invoke_subgraph for node in gm.graph.nodes)
    assert equal(compile_piece(gm)(*x), gm(*x))


def test_a_shared_body_is_inlined_at_every_call() -> None:
    @torch.compiler.nested_compile_region
    def half(z: Tensor) -> Tensor:
        return z.sin() * 0.5

    def twice(x: Tensor, y: Tensor) -> Tensor:
        return half(x) + half(half(y))

    gm = trace(twice, *rows_of(5)[1:])
    assert sum(node.target is invoke_subgraph for node in gm.graph.nodes) == 3
    args = rows_of(4)
    assert equal(compile_piece(gm)(*args), gm(*args))


def write(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    cache.index_put_((slots,), rows * 2)
    return cache[slots].sum(-1)


def in_place(cache: Tensor, rows: Tensor, slots: Tensor) -> GraphModule:
    """The write as the partition leaves it: index_put_ on the piece's input."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(write, decomposition_table=select_decomp_table(), tracing_mode="fake")(cache, rows, slots)


def functional(cache: Tensor, rows: Tensor, slots: Tensor) -> GraphModule:
    """The write as AOTAutograd leaves it: index_put, then copy_ back."""
    return trace(write, static=[cache, rows, slots])


def bytes_of(piece: Callable[..., Any], cache: Tensor, rows: Tensor, slots: Tensor) -> int:
    """Bytes allocated in one call."""
    piece(cache, rows, slots)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        piece(cache, rows, slots)
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    return sum(max(event.nbytes(), 0) for event in events)


@pytest.mark.parametrize("form", [in_place, functional])
def test_a_cache_write_stays_in_place(form: Callable[[Tensor, Tensor, Tensor], GraphModule]) -> None:
    slots, rows = torch.tensor([3, 900, 17]), torch.randn(3, 256)
    allocated = []
    for capacity in (1024, 64 * 1024):
        cache, plain = torch.zeros(capacity, 256), torch.zeros(capacity, 256)
        piece = compile_piece(form(cache.clone(), rows, slots))
        address = cache.data_ptr()
        (found,) = piece(cache, rows, slots)
        assert torch.equal(found, write(plain, rows, slots)) and torch.equal(cache, plain)
        assert cache.data_ptr() == address
        allocated.append(bytes_of(piece, cache, rows, slots))
    small, large = allocated
    assert small == large < 16 * 1024  # a copy of the cache would take 1 and 64 MiB


def test_inside_a_backend_the_strides_of_the_whole_graph_stay_its_own() -> None:
    pieces = []

    def backend(gm: GraphModule, inputs: Sequence[object]) -> Any:
        def inference(aten: GraphModule, fake: Sequence[object]) -> Callable[[list[Any]], Any]:
            pieces.append(compile_piece(aten))
            helper = compile_piece(aten)  # a second piece in the same compile, whose strides are not the graph's

            def run(args: list[Any]) -> Any:
                helper(*args)
                return pieces[-1](*args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return functional_aten(gm, inputs, inference, inference)

    torch.compiler.reset()
    compiled = torch.compile(mix, backend=backend)
    _, x, y = rows_of(6)
    with torch.no_grad():
        assert equal(compiled(x, y), mix(x, y)) and len(pieces) == 1


def test_without_a_compiler_the_reason_is_said(tmp_path: Path) -> None:
    if not inductor_keeps_explicit_casts():
        pytest.skip("this torch needs no compile to know that it drops casts")
    ask = "import torch; from v41.lowering.inductor import supported; print(supported(torch.device('cpu')))"
    environment = {**os.environ, "CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert "compiles nothing here: " in done.stdout and "/no/such/compiler" in done.stdout


def test_the_answer_is_what_a_run_shows() -> None:
    """Where `supported` answers by looking at Inductor, running the chain says the same."""
    chain = cast_chain(CPU)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = torch.equal(compile_piece(chain)(x)[0], chain(x)[0])
    assert kept == inductor_keeps_explicit_casts() == (supported(CPU) is None)
