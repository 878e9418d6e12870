"""What caches of Inductor's hold a pass of ours by: all that decides what it does to a graph, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from tests.passes.test_alone import POST, PRE, compiled, own_cache, project
from v41.passes.alone import in_order, inductor_pass, key_of, sources_of
from v41.passes.canonicalize import canonicalize
from v41.passes.fold_sinkhorn import fold_sinkhorn
from v41.passes.pipeline import PIPELINE, Pass
from v41.passes.trim_replay import trim_replay
from v41.report import Decision

pytestmark = pytest.mark.usefixtures(own_cache.__name__)


def shift(gm: GraphModule, by: object = 0) -> list[Decision]:
    return []


def key(*passes: Any, verify: bool = False) -> str | None:
    return key_of(in_order(passes), verify)


def test_every_pass_has_a_key_of_its_own() -> None:
    keys = [key(each.run) for each in PIPELINE]
    assert None not in keys and len({*keys}) == len(keys)
    assert keys == [key(each.run) for each in PIPELINE]


def caching(fn: Callable[..., Any] = project, *args: Any, **options: Any) -> str:
    """What Inductor's cache said to fn(*args), or project(...), compiled under `options`."""
    compiled(fn, *(args or (torch.rand(4, 8), torch.rand(8, 3))), **options)
    found = {
        name.removeprefix("fxgraph_cache_"): n for name, n in counters["inductor"].items() if "fxgraph_cache" in name
    }
    return " ".join(name for name in ("hit", "miss", "bypass") if found.get(name))


def test_inductors_cache_hits_where_nothing_changed_and_nowhere_else() -> None:
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": 1}))}) == "miss"
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": 1}))}) == "hit"
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": 2}))}) == "miss"
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": 1}), verify=True)}) == "miss"
    assert caching(**{PRE: inductor_pass(Pass(shift, settings={"by": 1}))}) == "miss"
    assert caching(**{POST: inductor_pass(Pass(shift, settings={"by": object()}))}) == "bypass"


def test_caches_tell_apart_what_the_user_calls_inputs_and_sizes_where_a_pass_goes_by_that() -> None:
    class Other(NamedTuple):
        x: Tensor
        kept_rows: Tensor

    class Same(NamedTuple):
        x: Tensor
        tokens: Tensor

    def read(s: Any) -> Tensor:
        s[1].detach()
        return s[0].relu()

    def said(made: Any, last: int, *passes: Any) -> str:
        given = made(torch.rand(5, 8), torch.arange(3))
        mark_unbacked(given[0], 0, shape_id="rows")
        mark_unbacked(given[1], 0, shape_id=f"last {last}")
        return caching(read, given, **{POST: inductor_pass(*passes)})

    assert [said(made, last, trim_replay) for made, last in ((Other, 5), (Other, 5), (Other, 4), (Same, 5))] == [
        "miss", "hit", "miss", "miss",
    ]  # fmt: skip
    assert [said(made, last, canonicalize) for made, last in ((Other, 5), (Other, 4), (Same, 5))] == [
        "miss", "hit", "hit",
    ]  # fmt: skip


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=6,
)


@given(plain, plain)
def test_settings_that_differ_give_other_keys(one: object, other: object) -> None:
    keys = [key(Pass(shift, settings={"by": value})) for value in (one, one, other)]
    assert keys[0] == keys[1] and keys[0] is not None
    assert (keys[0] == keys[2]) is (repr(one) == repr(other))


def test_a_key_holds_the_code_of_the_pass_as_it_is_in_the_process() -> None:
    def made(number: int) -> Callable[[GraphModule], list[Decision]]:
        names: dict[str, Any] = {"__name__": __name__}
        exec(f"def mine(gm):\n    return [][:{number}]", names)
        return names["mine"]  # type: ignore[no-any-return]

    assert key(made(1)) == key(made(1)) != key(made(2))


def test_a_key_holds_the_sources_that_a_pass_imports_of_its_own_package_and_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def package(name: str, number: int) -> str | None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "rules.py").write_text(f"LIMITS = frozenset([{number}])\n")
        (tmp_path / name / "mine.py").write_text("def mine(gm):\n    from .rules import LIMITS\n    return []\n")
        module = __import__(f"{name}.mine").mine
        assert [path.name for path in sources_of(f"{name}.mine")] == ["__init__.py", "mine.py", "rules.py"]
        return key(module.mine)

    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("one_alone", "same_alone", "other_alone")
    one, same, other = (package(name, number) for name, number in zip(names, (1, 1, 2), strict=True))
    for name in names:
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
    assert one == same != other


def test_a_source_may_be_imported_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole_alone").mkdir()
    for name, text in {"__init__": "", "words": "", "mine": "import whole_alone.words as words\n"}.items():
        (tmp_path / "whole_alone" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [path.name for path in sources_of("whole_alone.mine")] == ["__init__.py", "mine.py", "words.py"]


def test_the_sources_of_a_pass_are_its_own_closure_and_not_the_other_passes() -> None:
    names = {"/".join(path.parts[-2:]) for path in sources_of(fold_sinkhorn.__module__)}
    assert {
        "passes/fold_sinkhorn.py",
        "passes/matching.py",
        "v41/regions.py",
        "v41/report.py",
        "v41/_compat.py",
    } <= names
    assert not {"passes/outline_mhc.py", "passes/pipeline.py", "v41/backend.py"} & names


def test_a_key_holds_the_fake_of_custom_operators_which_inductors_own_key_leaves_out() -> None:
    def define(dtype: torch.dtype) -> str | None:
        with torch.library._scoped_library("v41_alone", "FRAGMENT") as library:
            library.define("half(Tensor x) -> Tensor")
            library.impl("half", lambda x: x.to(dtype), "CPU")
            torch.library.register_fake("v41_alone::half", lambda x: torch.empty_like(x, dtype=dtype), lib=library)
            return key(fold_sinkhorn)

    without = key(fold_sinkhorn)
    one, same, other = define(torch.float16), define(torch.float16), define(torch.bfloat16)
    assert one == same and len({without, one, other}) == 3
    assert key(fold_sinkhorn) == without
