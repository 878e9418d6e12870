"""reference: a page for each public module, made from its docstrings and signatures; nothing is written twice.

    python -m v41.tools.reference docs/reference

Public is what a name without an underscore, defined in the module itself, says it is. Order is that of the source.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from v41.passes.pipeline import PIPELINE
from v41.tools.files import write_whole

MODEL = ("config", "model", "batch", "cache", "buckets", "generation", "parallel", "checkpoint")  # what a caller needs
PAGES = {  # a page -> its modules
    "library": ("v41", "v41.report", "v41.options", "v41.tools.explanation", "v41.runtime.past_guards"),
    "plan": ("v41.plan", "v41.regions"),
    "passes": ("v41.passes.pipeline", "v41.passes.alone", *(each.run.__module__ for each in PIPELINE)),
    "model": tuple(f"v41.model_def.{name}" for name in MODEL),
    "errors": ("v41.errors", "v41.model_def.errors"),
    "saved-runs": ("v41.tools.run", "v41.tools.run_folder", "v41.tools.nodes", "v41.tools.kernels"),
}


def page(name: str) -> str:
    """The text of one page, as Markdown."""
    modules = map(import_module, PAGES[name])
    return "\n".join([f"# Reference: {name}\n", *(line for each in modules for line in of_module(each))])


def of_module(module: ModuleType) -> Iterator[str]:
    yield f"## {module.__name__}\n"
    yield from text(module)
    for name, thing in public(module):
        yield f"### {name}{signature(thing)}\n"
        yield from text(thing)
        if inspect.isclass(thing):
            for of_class, member in vars(thing).items():
                plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if inspect.isfunction(plain) and not of_class.startswith("_") and plain.__doc__:
                    call = "" if isinstance(member, property) else signature(plain)
                    yield f"#### {name}.{of_class}{call}\n"
                    yield from text(plain)


def public(module: ModuleType) -> list[tuple[str, Any]]:
    """Classes and functions of the module itself, in the order of its source."""
    found = [
        (name, thing)
        for name, thing in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(thing) or inspect.isfunction(thing))
        if thing.__module__ == module.__name__
    ]
    return sorted(found, key=lambda each: inspect.getsourcelines(each[1])[1])


def text(thing: Any) -> Iterator[str]:
    """The docstring; what is indented in it stands as it is."""
    told = inspect.getdoc(thing)
    made = is_dataclass(thing) and (told or "").startswith(f"{getattr(thing, '__name__', '')}(")  # dataclass made it up
    if told and not made:
        yield f"{told}\n"
    if is_dataclass(thing):
        yield "".join(f"- `{each.name}`: `{each.type}`\n" for each in fields(thing))


def signature(thing: Any) -> str:
    if inspect.isclass(thing):
        return ""
    return str(inspect.signature(thing)).replace("*", "\\*")


def write(folder: Path) -> list[Path]:
    """Writes every page."""
    paths = [folder / f"{name}.md" for name in PAGES]
    for path in paths:
        write_whole(path, page(path.stem))
    return paths


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])):
        print(path)
