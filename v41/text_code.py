"""define: a function made from text, which can be stored as text and made again in another process.

    check = define("def check(args): ...", "check", {"piece": "piece_3"}, "<inputs of piece_3>")
    recipe_of(check)  ->  Recipe(the same four things); `Recipe.make` gives an equal function

What the text reads must be in `scope` and be storable itself: numbers, dtypes, modules, module-level functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    text: str
    name: str  # of the function, among what the text defines
    scope: dict[str, Any]
    filename: str  # what a traceback shows

    def make(self) -> Callable[..., Any]:
        names = dict(self.scope)
        exec(compile(self.text, self.filename, "exec"), names)
        made = names[self.name]
        made.v41_recipe = self
        return made


def define(text: str, name: str, scope: Mapping[str, Any], filename: str) -> Callable[..., Any]:
    """The function `name` that `text` defines over the names of `scope`."""
    return Recipe(text, name, dict(scope), filename).make()


def recipe_of(function: object) -> Recipe | None:
    """How `define` made `function`; None for any other."""
    return getattr(function, "v41_recipe", None)
