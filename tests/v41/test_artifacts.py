"""A second process loads what the first compiled: the same bits; anything that differs, or is damaged, is a miss."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.compiler_bisector import CompilerBisector
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

import v41
from tests.v41.artifact_process import arguments, plain, run, step
from tests.v41.test_artifact_key import X, scaled
from v41 import artifact_cache, artifact_key, artifact_store, backend
from v41._compat_cache import NotStorable
from v41.artifact_key import Key, key_of
from v41.artifact_store import ArtifactCacheWarning, ArtifactStore, Damaged, Miss, Pickler, checked
from v41.errors import BodyNotKept
from v41.lowering.generated import GeneratedPiece, generate_piece
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.passes.pipeline import PIPELINE, Pass
from v41.report import CompileReport
from v41.text_code import define

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArtifactStore]:
    """A store of the test's own, and no compiled code from the test before."""
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path / "programs"))
    torch.compiler.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", ArtifactCacheWarning)
        yield ArtifactStore(tmp_path / "programs")


def again(sizes: tuple[int, ...] = (3,), codegen: str = "eager") -> tuple[CompileReport, list[Any]]:
    """As in a new process: Dynamo knows nothing."""
    torch.compiler.reset()
    return run(codegen, sizes)


def expected(sizes: tuple[int, ...] = (3,)) -> list[Any]:
    """What eager returns and leaves, as `plain` spells it."""
    return plain([(step(*given), given) for given in map(arguments, sizes)])


def compiled_twice(function: Callable[..., Any], *args: Any) -> tuple[list[str], Callable[..., Any]]:
    """What the cache said of two compiles, and the second's function."""
    told = []
    for _ in range(2):
        torch.compiler.reset()
        made = torch.compile(function, backend="v41", options={"codegen": "eager"})
        with v41.collect() as reports:
            made(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))
        told += [report.cache for report in reports]
    return told, made


def entry(store: ArtifactStore) -> Path:
    (path,) = store.directory.glob("*")
    return path


def test_a_hit_has_the_bits_and_the_report_of_the_miss() -> None:
    sizes = (3, 0, 1, 7)
    (cold, first), (warm, second) = again(sizes), again(sizes)
    assert cold.cache == "miss: the store is empty; stored"
    assert warm.cache.startswith("hit ") and list(warm.seconds) == ["cache"]
    assert plain(first) == plain(second) == expected(sizes)
    for name in ("options", "passes", "pieces", "artifacts", "kernels", "fallbacks"):
        assert getattr(warm, name) == getattr(cold, name), name
    assert str(warm.plan) == str(cold.plan)
    with pytest.raises(BodyNotKept):
        _ = warm.plan.pieces[0].body.graph  # type: ignore[union-attr]


def test_what_only_the_run_asks_for_is_no_other_program() -> None:
    told = []
    for more in ({}, {"capture": "off"}, {"buckets": {"rows": (1, 2)}}, {"tune": True}, {"verify": True}):
        torch.compiler.reset()
        options: dict[str, Any] = {"codegen": "eager", **more}
        with v41.collect() as reports:
            torch.compile(lambda x: x * 2, backend="v41", options=options)(torch.ones(3))
        told += [report.cache.split()[0] for report in reports]
        assert reports[0].options["capture"][1] == ("options" if "capture" in more else "auto: no CUDA graphs on cpu")
    assert told == ["miss:", "hit", "hit", "hit", "miss:"]


def test_processes_that_compile_at_once_and_one_after_them(store: ArtifactStore) -> None:
    command = [sys.executable, "-m", "tests.v41.artifact_process", "eager"]
    together = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in together]
    assert [process.returncode for process in together] == [0, 0]
    report, results = again()
    assert report.cache.startswith("hit ")
    assert told[0]["results"] == told[1]["results"] == json.loads(json.dumps(plain(results)))
    assert entry(store).suffix == ".v41", "one entry, and no file that was being written"


def test_aliases_of_inputs_are_aliases_in_a_loaded_program() -> None:
    told, function = compiled_twice(lambda x: (x, None, x[1], x * 2), torch.ones(3, 2))
    assert told[1].startswith("hit ")
    x = torch.ones(3, 2)
    same, none, row, double = function(x)
    x.zero_()
    assert same is x and none is None and row.count_nonzero() == 0 and double.count_nonzero() == 6


def test_a_recompile_for_a_symbolic_size_is_stored_too() -> None:
    for times in range(2):
        torch.compiler.reset()
        function = torch.compile(lambda x: x.sum(0) * x.shape[0], backend="v41", options={"codegen": "eager"})
        with v41.collect() as reports:
            for rows in (3, 4, 5):
                x = torch.randn(rows, 2)
                assert torch.equal(function(x), x.sum(0) * rows)
        assert [(r.cache.split()[0], r.recompiles) for r in reports] == [(("miss:", "hit")[times], n) for n in (0, 1)]


# ---- the store


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "a flipped bit": flip,
    "empty": lambda path: path.write_bytes(b""),
    "another format": lambda path: path.write_bytes(path.read_bytes().replace(b"v41 program 1", b"v41 program 0", 1)),
    "no entry at all": lambda path: path.write_text("{}"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_a_miss_with_a_warning(tmp_path: Path, how: str) -> None:
    path = written(tmp_path, {"a": 1.5})
    DAMAGE[how](path)
    with pytest.warns(ArtifactCacheWarning, match=path.name):
        found = ArtifactStore(tmp_path).get(ANY)
    assert isinstance(found, Miss) and path.name in found.why


def test_a_damaged_entry_is_written_anew(store: ArtifactStore) -> None:
    again()
    path = entry(store)
    flip(path)
    with pytest.warns(ArtifactCacheWarning, match=path.name):
        report, results = again()
    assert report.cache.startswith("miss: ") and report.cache.endswith("; stored")
    assert plain(results) == expected()
    assert again()[0].cache.startswith("hit ")


@given(st.data())
def test_no_flipped_bit_passes(data: st.DataObject) -> None:
    content = bytearray(WHOLE)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Damaged):
        checked(bytes(content))


class Trap:
    """Something that unpickling would run."""

    sprung = False

    def __reduce__(self) -> tuple[Any, ...]:
        return spring, ()


def spring() -> None:
    Trap.sprung = True


ANY = Key({"program": {"wiring": "1"}})


def written(tmp: Path, values: Any) -> Path:
    store = ArtifactStore(tmp)
    assert store.put(ANY, values) is None
    return store.path(ANY)


def whole() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return written(Path(folder), {"a": 1.5}).read_bytes()


WHOLE = whole()


def test_nothing_is_unpickled_unless_the_sum_holds(tmp_path: Path) -> None:
    path = written(tmp_path, Trap())
    flip(path)
    with pytest.warns(ArtifactCacheWarning, match="checksum"):
        assert isinstance(ArtifactStore(tmp_path).get(ANY), Miss)
    assert not Trap.sprung
    written(tmp_path, Trap())
    ArtifactStore(tmp_path).get(ANY)
    assert Trap.sprung, "the trap works"
    Trap.sprung = False


def test_an_entry_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    store, other = ArtifactStore(tmp_path), Key({"program": {"wiring": "2"}})
    written(tmp_path, 1).rename(store.path(other))
    with pytest.warns(ArtifactCacheWarning, match="another key"):
        assert isinstance(store.get(other), Miss)


def test_a_directory_that_cannot_be_written_is_a_warning(store: ArtifactStore) -> None:
    store.directory.write_text("a file stands where the directory should be")
    with pytest.warns(ArtifactCacheWarning, match="programs"):
        report, results = again()
    assert report.cache.startswith("miss: ") and "not stored: " in report.cache
    assert plain(results) == expected()


def test_a_write_that_fails_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    store.path(ANY).mkdir()  # what cannot be replaced
    with pytest.warns(ArtifactCacheWarning, match=store.path(ANY).name):
        assert store.put(ANY, 1) is not None
    assert list(tmp_path.iterdir()) == [store.path(ANY)]


def test_what_a_killed_process_was_writing_is_deleted_later(tmp_path: Path) -> None:
    left, now = tmp_path / "left.writing", tmp_path / "now.writing"
    for path in (left, now):
        path.write_bytes(b"v41")
    os.utime(left, (0, 0))
    written(tmp_path, 1)
    assert not left.exists() and now.exists()


@pytest.mark.parametrize("head", ["null", "[]", '{"a": 1}'])
def test_a_neighbour_with_no_key_explains_nothing(tmp_path: Path, head: str) -> None:
    path = written(tmp_path, 1)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], head.encode(), *lines[3:]]))
    assert ArtifactStore(tmp_path).get(Key({"program": {"wiring": "2"}})) == Miss("the store is empty")


def test_without_a_home_there_is_no_store_but_a_named_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path))
    assert artifact_store.open_store() == ArtifactStore(tmp_path)
    monkeypatch.delenv("V41_CACHE_DIR")
    assert artifact_store.open_store() == "no home directory, and V41_CACHE_DIR names no other"


def test_the_store_keeps_what_was_used_last(tmp_path: Path) -> None:
    store, keys = ArtifactStore(tmp_path), [Key({"program": {"wiring": str(n)}}) for n in range(4)]
    for age, made in enumerate(keys):
        store.put(made, b"x" * 1000)
        os.utime(store.path(made), (age, age))
    assert store.get(keys[0]) == b"x" * 1000  # used now
    store.trim(3 * 1200)
    assert [store.path(made).exists() for made in keys] == [True, False, True, True]
    assert store.nearest(Key({"program": {"wiring": "9"}})) == "nearest entry differs in program: wiring"


# ---- what is not stored


def a_function_of_the_user(x: Tensor) -> Tensor:
    return x * 2


def test_a_graph_that_no_key_can_tell_apart_has_none() -> None:
    torch._dynamo.allow_in_graph(a_function_of_the_user)
    told, _ = compiled_twice(lambda x: a_function_of_the_user(x) + 1, *X)
    assert all(line.startswith("off: the graph calls") for line in told), told
    holder = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    with pytest.raises(NotStorable, match=r"is a|holds"):
        key_of(holder, options={}, passes=[], device=torch.device("cpu"))


def test_off_says_why(monkeypatch: pytest.MonkeyPatch, store: ArtifactStore) -> None:
    function = torch.compile(scaled(2.0), backend="v41", options={"codegen": "eager", "cache": False})
    with v41.collect() as reports:
        function(*X)
    torch.compiler.reset()
    with v41.collect(programs=True) as more:
        torch.compile(scaled(2.0), backend="v41", options={"codegen": "eager"})(*X)
    monkeypatch.setenv("V41_CACHE_DIR", "off")
    told = [reports[0].cache, more[0].cache, again()[0].cache]
    monkeypatch.delenv("V41_CACHE_DIR")
    with monkeypatch.context() as bisecting:
        bisecting.setattr(CompilerBisector, "bisection_enabled", True)
        told.append(again()[0].cache)
    assert told[0] == "off: options" and told[1].startswith("off: collect(programs=True)")
    assert told[2] == "off: V41_CACHE_DIR=off" and told[3] == "off: torch's bisector switches passes off"
    assert not store.directory.exists()


def test_trouble_that_may_pass_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(gm: GraphModule) -> list[Any]:
        raise RuntimeError("once")

    for module in (backend, sys.modules["v41.passes.pipeline"]):
        monkeypatch.setattr(module, "PIPELINE", (*PIPELINE, Pass(stumble)))
    monkeypatch.setattr(backend.run_pipeline, "__defaults__", ((*PIPELINE, Pass(stumble)),))
    assert again()[0].cache.endswith("not stored: the pass stumble failed")


def test_sources_edited_in_the_meantime_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_cache, "sources", lambda: artifact_key.SOURCES | {"plan.py": "edited"})
    assert again()[0].cache.endswith("not stored: sources changed since the start of this process: plan.py")


def test_inputs_that_share_memory_are_compiled_each_time() -> None:
    """AOTAutograd guards on how they overlap, and a loaded program would not have that guard."""

    def both(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return b + 1

    base = torch.arange(6.0)
    first, last = base[:4], base[2:]
    torch._dynamo.mark_dynamic(first, 0)
    with v41.collect() as reports:
        result = torch.compile(both, backend="v41", options={"codegen": "eager"})(first, last)
    assert torch.equal(result, torch.tensor([5.0, 7.0, 5.0, 6.0]))
    assert "not stored: AOTAutograd guards on inputs that share memory" in reports[0].cache


# ---- what is stored


def through_pickle(value: Any) -> Any:
    return pickle.loads(artifact_store.pickled(value))


def test_text_and_what_it_reads_come_back() -> None:
    text = "def f(x):\n    return torch.relu(x) * by + inf"
    function = define(text, "f", {"torch": torch, "by": 0.1, "inf": 1.0}, "<t>")
    assert torch.equal(through_pickle(function)(X[0]), function(X[0]))
    with pytest.raises(NotStorable, match="graph module"):
        artifact_store.pickled(torch.fx.symbolic_trace(scaled(2.0)))
    with pytest.raises(Exception, match=r"local|lambda|pickle"):
        artifact_store.pickled(lambda: 1)
    assert issubclass(Pickler, pickle.Pickler)


def test_a_generated_piece_comes_back_with_its_text_and_its_check() -> None:
    from tests.strategies.tracing import trace

    body = trace(lambda x: (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * x, torch.rand(5, 64))
    made = generate_piece(body, "norm", "piece_3")
    assert isinstance(made, GeneratedPiece), made
    back = through_pickle(made)
    assert back.kernel == replace(made.kernel, _arrivals=back.kernel._arrivals)
    with pytest.raises(Exception, match="piece_3"):
        back.check((torch.rand(5, 32),) * 4)


@pytest.mark.slow
def test_pieces_of_inductor_come_back_with_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though somebody wrote over the files in which Inductor keeps its code: the entry has it too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    sizes = (3, 0, 7)
    cold, first = again(sizes, "inductor")
    files = list((tmp_path / "inductor").glob("*/*.py"))
    for path in files:
        path.write_text("raise RuntimeError('damaged')")
    warm, second = again(sizes, "inductor")
    assert cold.cache.endswith("; stored") and warm.cache.startswith("hit ")
    assert plain(first) == plain(second) == expected(sizes)
    assert sum("damaged" not in path.read_text() for path in files) == warm.artifacts > 0


@pytest.mark.slow
def test_the_tiny_model_comes_back_with_its_bits() -> None:
    """A chunk, then a row each: the loaded program runs steps of other sizes as the compiled one does."""
    torch.manual_seed(0)
    model = V41ForCausalLM(V41Config.preset("tiny")).eval()
    chunks = [[Chunk([5, 6, 7], 0, 0), Chunk([8, 9], 0, 1)], [Chunk([5, 6, 7, 1], 3, 0), Chunk([8, 9, 2], 2, 1)]]

    def outcome(function: Callable[..., Tensor]) -> list[Any]:
        cache = Cache.zeros(model.config, 2, 64)
        logits = [function(build_batch(model.config, cache, step), cache) for step in chunks]
        return [logits, [value.tolist() for value in tree_leaves(vars(cache)) if isinstance(value, Tensor)]]

    told, outcomes = [], [outcome(model)]
    for _ in range(2):
        torch.compiler.reset()
        with v41.collect() as reports:
            options = {"codegen": "eager"}
            outcomes.append(outcome(torch.compile(model, backend="v41", fullgraph=True, options=options)))
        told += [report.cache.split()[0] for report in reports]
    assert told == ["miss:", "hit"]
    assert plain(outcomes[0]) == plain(outcomes[1]) == plain(outcomes[2])
