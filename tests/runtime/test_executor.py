"""executor: the flat function calls pieces in order, shares artifacts, frees what is dead, empties the list given."""

from __future__ import annotations

import gc
import timeit
import weakref
from typing import Any

import torch
from torch import Tensor

from tests.passes.test_partition import ROWS, WEIGHTS, layers, with_seams
from v41.plan import Piece, Plan
from v41.runtime.executor import eager_artifact, executor, source
from v41.text_code import recipe_of


def piece(name: str, reads: str, returns: str, frees: str, key: str) -> Piece:
    """A piece with no body: the executor needs names and key alone."""
    words = [tuple(text.split()) for text in (reads, returns, frees, "")]
    return Piece(name, *words, "-", key, "-", 1, torch.fx.GraphModule({}, torch.fx.Graph()))  # type: ignore[arg-type]


PLAN = Plan(
    inputs=("a", "b", "unused"),
    outputs=("d", None, "a", 7),
    values=dict.fromkeys(("a", "b", "unused", "c", "d"), "f32[2]"),
    pieces=(
        piece("piece_0", "a b", "c", "b", "add"),
        piece("piece_1", "c a", "d", "c", "add"),
        piece("piece_2", "d", "", "", "log"),
    ),
)


def test_the_source_is_flat_and_frees_after_the_last_use() -> None:
    assert source(PLAN.inputs, PLAN.pieces, PLAN.outputs).splitlines() == [
        "def run(inputs):",
        "    a, b, unused = inputs",
        "    inputs.clear()",
        "    del unused",
        "    c, = piece_0(a, b)",
        "    del b",
        "    d, = piece_1(c, a)",
        "    del c",
        "    piece_2(d)",
        "    return (d, None, a, 7)",
    ]


def test_pieces_run_in_order_and_share_their_artifact() -> None:
    calls: list[Any] = []

    def add(x: Tensor, y: Tensor) -> tuple[Tensor]:
        calls.append("add")
        return (x + y,)

    def log(x: Tensor) -> tuple[()]:
        calls.append(x.tolist())
        return ()

    run = executor(PLAN, {"add": add, "log": log})
    a, b = torch.ones(2), torch.full((2,), 2.0)
    boxed = [a, b, None]
    d, nothing, same, seven = run(boxed)
    assert boxed == [] and same is a and nothing is None and seven == 7
    assert calls == ["add", "add", [4.0, 4.0]] and d.tolist() == [4.0, 4.0]
    assert run._boxed_call  # type: ignore[attr-defined]


def test_a_dead_value_is_gone_before_the_next_piece() -> None:
    born: list[Any] = []

    def add(x: Tensor, y: Tensor) -> tuple[Tensor]:
        born.append(weakref.ref(x))
        return (x + y,)

    def log(x: Tensor) -> tuple[()]:
        gc.collect()
        assert born[1]() is None, "piece_1's first operand still lives"
        return ()

    executor(PLAN, {"add": add, "log": log})([torch.ones(2), torch.ones(2), None])


def test_an_eager_artifact_has_no_subgraph_call_left_and_the_same_bits() -> None:
    gm = with_seams(layers, ROWS, static=WEIGHTS)
    gm.recompile()
    run = eager_artifact(gm)
    recipe = recipe_of(run.__func__)  # type: ignore[attr-defined]
    assert recipe is not None and "invoke_subgraph" not in recipe.text
    inputs = [ROWS if "u0" in str(n.meta["val"].shape) else None for n in gm.graph.nodes if _is_tensor(n)]
    weights = iter(WEIGHTS)
    inputs = [value if value is not None else next(weights) for value in inputs]
    sizes = [3] * sum(node.op == "placeholder" and not _is_tensor(node) for node in gm.graph.nodes)
    assert torch.equal(run(*sizes, *inputs)[0], layers(ROWS, *WEIGHTS))


def _is_tensor(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta["val"], Tensor)


def test_a_piece_costs_little_host_time() -> None:
    """Eighty pieces that do nothing: what is left is the executor's own time, about a tenth of a microsecond each."""
    count = 80
    names = [f"v{i}" for i in range(count + 1)]
    pieces = tuple(piece(f"piece_{i}", names[i], names[i + 1], names[i], "same") for i in range(count))
    plan = Plan(inputs=("v0",), outputs=(names[-1],), values=dict.fromkeys(names, "f32[]"), pieces=pieces)
    run, value = executor(plan, {"same": lambda x: (x,)}), torch.ones(())
    microseconds = min(timeit.repeat(lambda: run([value]), number=50, repeat=5)) / 50 / count * 1e6
    assert microseconds < 5, f"{microseconds:.2f} µs a piece"
