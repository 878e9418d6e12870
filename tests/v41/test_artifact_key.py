"""The key of a stored program: equal for equal programs, and where two differ it names the one part that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch.fx import GraphModule

from tests.v41.artifact_process import arguments, step
from v41 import artifact_key
from v41._compat_cache import code_hash
from v41.artifact_key import Key, key_of


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def graph_of(function: Callable[..., Any], *args: Any) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*args)
    return graphs[0]


def key(function: Callable[..., Any] = step, args: tuple[Any, ...] | None = None, **facts: Any) -> Key:
    known = {"options": {}, "passes": [], "device": torch.device("cpu")} | facts
    return key_of(graph_of(function, *(arguments(3) if args is None else args)), **known)


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by + 1


def test_equal_programs_have_one_key_whatever_the_values_and_rows() -> None:
    assert key().digest == key(args=arguments(5)).digest


X, WIDE = (torch.ones(2, 2),), torch.ones(2, 3)
CHANGES: dict[str, tuple[str, Callable[[], tuple[Key, Key]]]] = {
    "a constant by its last bit": (
        "program: numbers",
        lambda: (key(scaled(2.5), X), key(scaled(2.5 + 2**-51), X)),
    ),
    "the sign of a zero": ("program: numbers", lambda: (key(scaled(0.0), X), key(scaled(-0.0), X))),
    "an operator": ("program: wiring", lambda: tuple(key(f, X) for f in (torch.sin, torch.cos))),
    "a dtype": ("program: inputs", lambda: tuple(key(scaled(2.0), (x,)) for x in (X[0], X[0].double()))),
    "strides": ("program: inputs", lambda: tuple(key(scaled(2.0), (x,)) for x in (WIDE, WIDE.T.contiguous().T))),
    "a shape_id": ("program: inputs", lambda: tuple(key(args=arguments(3, name)) for name in ("rows", "requests"))),
    "an option": ("options: verify", lambda: tuple(key(options={"verify": on}) for on in (True, False))),
    "a pass": ("passes: 0 p", lambda: tuple(key(passes=[("p", run)]) for run in (lambda gm: [], lambda gm: [1]))),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_named(change: str) -> None:
    part, make = CHANGES[change]
    one, other = make()
    lines = [line for line in one.differences(other.parts) if not line.startswith("program: lines")]
    assert one.digest != other.digest
    assert len(lines) == 1 and lines[0].startswith(part), lines


@pytest.mark.parametrize("part, patch", [
    ("torch: matmul precision", lambda m: m.setattr(torch, "get_float32_matmul_precision", lambda: "high")),
    ("torch: attention", lambda m: m.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)),
    ("environment: TRITON_INTERPRET", lambda m: m.setenv("TRITON_INTERPRET", "1")),
    ("versions: torch", lambda m: m.setattr(torch, "__version__", "9.9")),
    ("device: capability", lambda m: m.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")),
    ("sources: passes/canonicalize.py", lambda m: m.setitem(artifact_key.SOURCES, "passes/canonicalize.py", "other")),
])  # fmt: skip
def test_surroundings_are_in_the_key(part: str, patch: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(scaled(2.0), X)
    patch(monkeypatch)
    assert before.differences(key(scaled(2.0), X).parts) == [part]


def test_the_configuration_of_torch_is_in_the_key() -> None:
    before = key(scaled(2.0), X)
    with torch._inductor.config.patch(epilogue_fusion=False):
        assert before.differences(key(scaled(2.0), X).parts) == ["torch: inductor"]


def test_every_source_of_the_compiler_is_in_the_key(tmp_path: Path) -> None:
    assert {"backend.py", "passes/analysis/effects.py", "lowering/rowwise/emit.py", "runtime/executor.py"} <= set(
        artifact_key.sources()
    )
    (tmp_path / "passes").mkdir()
    for text in ("A = 1\n", "A = 2\n"):
        (tmp_path / "passes" / "one.py").write_text(text)
        made = artifact_key.sources(tmp_path)
        assert list(made) == ["passes/one.py"]
        other, made = made, artifact_key.sources(tmp_path)
    (tmp_path / "passes" / "one.py").write_text("A = 3\n")
    assert artifact_key.sources(tmp_path) != other


def test_the_fake_of_a_custom_operator_is_in_the_key() -> None:
    keys = []
    for fake in (lambda x: torch.empty_like(x), lambda x: torch.empty_like(x).contiguous()):
        with torch.library._scoped_library("v41_artifacts", "DEF") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x * 2, "CPU")
            torch.library.register_fake("v41_artifacts::twice", fake, lib=library)
            keys.append(key(lambda x: torch.ops.v41_artifacts.twice(x), X))
    assert keys[0].differences(keys[1].parts) == ["operators: v41_artifacts.twice.default"]


def test_the_hash_of_code_sees_what_it_reads() -> None:
    def outer(inner: Callable[[], int], default: float = 1.0) -> Callable[..., Any]:
        def call(by: float = default) -> float:
            return by * inner()

        return call

    hashes = {code_hash(outer(*args)) for args in [(lambda: 1,), (lambda: 2,), (lambda: 1, 2.0)]}
    assert len(hashes) == 3
    assert code_hash(outer(lambda: 1)) in hashes
