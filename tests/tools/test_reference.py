"""Reference pages hold every public name with its docstring, as it stands in the source."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import v41
from tests.conftest import ROOT
from v41 import errors, report
from v41.tools.reference import PAGES, page, public, write


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_every_public_name_with_its_docstring(name: str) -> None:
    text = page(name)
    for module in map(import_module, PAGES[name]):
        assert f"## {module.__name__}\n" in text and inspect.getdoc(module) in text
        for each, thing in public(module):
            assert f"### {each}" in text
            assert (inspect.getdoc(thing) or "") in text or (inspect.getdoc(thing) or "").startswith(f"{each}(")


def test_what_is_imported_is_told_at_home_alone() -> None:
    names = dict(public(report)).keys()
    assert "Plan" not in names and {"collect", "last_report", "CompileReport"} <= names
    assert len(public(errors)) == sum(inspect.isclass(each) for each in vars(errors).values())
    homes = {module for modules in PAGES.values() for module in modules}
    assert set(v41.HOMES.values()) <= homes


def test_what_readers_are_told_to_import_has_a_page() -> None:
    told = "".join((ROOT / name).read_text() for name in ("README.md", "docs/tutorial.md"))
    modules = [module for modules in PAGES.values() for module in modules]
    assert {*re.findall(r"^from (v41\.\S+) import", told, re.MULTILINE)} <= {*modules}
    assert len({*modules}) == len(modules)  # each on one page


def test_pages_are_written(tmp_path: Path) -> None:
    assert [path.read_text() for path in write(tmp_path / "reference")] == [page(name) for name in PAGES]
