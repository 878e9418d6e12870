"""The house rules hold, and each check can fail: a breach planted in a copy of the tree is found, the copy is clean."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = ("v41", "model_def", "passes", "lowering", "runtime", "tools", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.is_file())
OURS = [path for path in FILES if path.relative_to(ROOT).parts[0] != "tests"]
SCRIPTS = Path(sys.executable).parent
# Private torch is for v41/_compat.py and its siblings; Batch marks its own tensors.
COMPAT = ("", "_barriers", "_cache", "_frames", "_groups", "_sizes", "_symmetric", "_tools", "_trace")
PRIVATE_TORCH = {*(f"v41/_compat{of}.py" for of in COMPAT), "model_def/batch.py"}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPTS / command[0]), *command[1:]], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tree as a clone has it: sources and settings, without caches and environments."""
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS[:-1]:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


IMPORTS = {  # what is planted where -> the file
    "import v41.report": "model_def/planted.py",
    "from v41.passes import analysis": "model_def/planted_2.py",
    "import v41.lowering": "passes/planted.py",
    "import v41.runtime": "lowering/planted.py",
    "import v41.passes": "runtime/planted.py",
    "import v41.model_def": "passes/planted_2.py",
    "from v41 import passes": "v41/options.py",
    "import v41.tools": "v41/backend.py",
}


@pytest.mark.parametrize("line", IMPORTS)
def test_import_rules_find_a_planted_import(copy: Path, line: str) -> None:
    check = ("lint-imports", "--no-logo", "--no-cache")
    clean = run(copy, *check)
    assert clean.returncode == 0, clean.stdout + clean.stderr

    plant(copy / IMPORTS[line], line)
    broken = run(copy, *check)
    assert broken.returncode == 1 and "BROKEN" in broken.stdout, broken.stdout + broken.stderr


def test_types_find_a_planted_error(copy: Path) -> None:
    if (ROOT / ".mypy_cache").is_dir():  # warm, as lint ran before
        shutil.copytree(ROOT / ".mypy_cache", copy / ".mypy_cache")
    clean = run(copy, "mypy")
    assert clean.returncode == 0, clean.stdout + clean.stderr

    plant(copy / "passes" / "planted.py", "def rows() -> int:\n    return 'seven'\n\n\ndef untyped(x):\n    return x")
    broken = run(copy, "mypy")
    assert broken.returncode == 1
    found = re.findall(r"passes/planted\.py:\d+: error: .*\[([\w-]+)\]", broken.stdout)
    assert sorted(found) == ["no-untyped-def", "return-value"], broken.stdout


@pytest.mark.parametrize("line", [f"import {folder}" for folder in FOLDERS[1:-1]] + ["from passes import analysis"])
def test_lint_finds_a_second_copy_of_a_package(copy: Path, line: str) -> None:
    clean = run(copy, "ruff", "check", "--no-cache", ".")
    assert clean.returncode == 0, clean.stdout

    plant(copy / "tools" / "planted.py", line)
    broken = run(copy, "ruff", "check", "--no-cache", "--output-format=concise", "tools/planted.py")
    assert broken.returncode == 1 and "TID251" in broken.stdout, broken.stdout


def test_ci_runs_every_check() -> None:
    """The planted breaches above fail what `make test` calls, and CI calls `make test`."""
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()
    planned = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True)
    commands = re.findall(r"bin/(ruff check|mypy|lint-imports|python -m pytest)", planned.stdout)
    assert commands == ["ruff check", "mypy", "lint-imports", "python -m pytest"], planned.stdout + planned.stderr


def plant(path: Path, text: str) -> None:
    """Appends `text` to `path`, which may be new."""
    before = path.read_text() if path.exists() else '"""Planted."""\n'
    path.write_text(f"{before}\n{text}\n")


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in FILES if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent
    assert [path for path in OURS if not path.stat().st_size] == []


def test_private_torch_is_touched_in_one_place() -> None:
    sample = "import torch._dynamo as d\ntorch._inductor.config.x\nfrom torch._C import y\nimport torch.fx, torch.nn"
    assert private_torch(sample) == ["torch._C", "torch._dynamo", "torch._inductor"]
    breaches = {str(path.relative_to(ROOT)): private_torch(path.read_text()) for path in OURS}
    assert {path: names for path, names in breaches.items() if names and path not in PRIVATE_TORCH} == {}


def private_torch(source: str) -> list[str]:
    """Private torch packages that a source imports or reaches by attribute."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names.add(f"torch.{node.attr}")
    return sorted({match[0] for name in names if (match := re.match(r"torch\._[A-Za-z]\w*", name))})


def test_no_path_of_one_machine() -> None:
    """Comments, docs and settings name no absolute folder that a reader lacks."""
    settings = (path for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".ci/run") for path in ROOT.glob(pattern))
    texts = [*FILES, *settings]
    pattern = re.compile(r"(?<![\w.\-}])/(work|root|tmp|home|opt|Users)/\w")
    assert pattern.search("see /" + "home/someone") and not pattern.search("a/home/b and ../opt/x")
    assert [f"{path}: {match[0]}" for path in texts if (match := pattern.search(path.read_text()))] == []


def test_long_files_are_named() -> None:
    """400 lines is where a file stops; past 500 the run says so without failing."""
    for path in FILES:
        lines = len(path.read_text().splitlines())
        if lines > 500:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines; is it still one idea?", stacklevel=1)
    assert FILES and all(path.suffix == ".py" for path in FILES)


def test_a_wheel_holds_every_folder(copy: Path) -> None:
    """Built offline, then imported from the wheel alone; the entry points that people use are in it."""
    expected = {source(path, copy) for folder in FOLDERS[:-1] for path in (copy / folder).rglob("*.py")}
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    built = run(copy, "python", "-m", "pip", "wheel", *offline, "--wheel-dir", "out", ".")
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (copy / "out").glob("v41-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        archive.extractall(copy / "site")
    assert {name for name in names if name.endswith(".py")} == expected
    assert {name for name in names if name.endswith(".txt") and "dist-info" not in name} == {"v41/tools/prompts.txt"}
    assert "v41 = v41.backend:v41" in entry_points and "v41 = v41.tools.cli:main" in entry_points

    code = "import sys; sys.path.insert(0, sys.argv[1]); import v41.passes, v41.tools; print(v41.passes.__file__)"
    imported = run(copy, "python", "-I", "-c", code, str(copy / "site"))
    assert imported.stdout.strip() == str(copy / "site" / "v41" / "passes" / "__init__.py"), imported.stderr


def source(path: Path, root: Path) -> str:
    """The name inside a wheel of a file of the tree."""
    inside = path.relative_to(root).as_posix()
    return inside if inside.startswith("v41/") else f"v41/{inside}"
