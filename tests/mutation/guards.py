"""guards: all that decides in a source, and each way to break it. A break is a mutant, which some test must kill.

    rule    a rule of RULES finds nobody at fault        is      a comparison is another (== !=, < <=, is, in)
    if      the condition of an if is False, or True     one     a number in a comparison is one more
    either  an `a if c else b` is a, or b                and     an `and`, an `or` lacks an operand
    keep    a comprehension keeps what its if dropped    not     a `not` goes
    case    a case never matches, or without its guard   all     any for all, min for max, and back
    flag    a function that returns True returns False

Left alone: what only states facts (asserts, annotations, texts, decorators, defaults, imports for type checkers), and
loops, which would not end.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
SWAPPED = {"any": "all", "all": "any", "min": "max", "max": "min"}
STATES = ("annotation", "returns", "decorator_list", "args", "type_ignores")  # fields of statements that decide nothing


@dataclass(frozen=True)
class Mutant:
    """Edit `number` of `file`. lines: those of the statement, or of the condition, that holds it."""

    file: str
    number: int
    kind: str
    line: int
    lines: tuple[int, int]
    function: str  # where it is; "" for the module itself
    change: str

    @property
    def key(self) -> str:
        """Names the mutant while lines move."""
        return f"{self.file} {self.function}: {self.change}"


@dataclass(frozen=True)
class Edit:
    kind: str
    old: ast.AST
    words: str
    lines: tuple[int, int]
    function: str
    apply: Callable[[], object]  # changes the tree in place


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of one source, in the order of its text."""
    found, seen = [], Counter[tuple[str, str]]()
    for number, edit in enumerate(_edits(ast.parse(source))):
        seen[edit.function, edit.words] += 1
        nth = seen[edit.function, edit.words]
        words = edit.words if nth == 1 else f"{edit.words}  ({nth})"
        line = getattr(edit.old, "lineno", edit.lines[0])
        found.append(Mutant(file, number, edit.kind, line, edit.lines, edit.function, words))
    return found


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The tree of `source` with this one edit."""
    tree = ast.parse(source)
    list(_edits(tree))[mutant.number].apply()
    return ast.fix_missing_locations(tree)


def _edits(tree: ast.Module) -> Iterator[Edit]:
    yield from _of_statements(tree.body, "")


def _of_statements(body: list[ast.stmt], function: str) -> Iterator[Edit]:
    for statement in body:
        if isinstance(statement, ast.Assert | ast.Import | ast.ImportFrom) or _is_for_type_checkers(statement):
            continue
        inside = f"{function}.{statement.name}".lstrip(".") if hasattr(statement, "name") else function
        yield from _of_rules(statement, inside)
        for name, value in ast.iter_fields(statement):
            if name in STATES:
                continue
            for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.match_case):
                    yield from _of_case(child, inside)
                elif isinstance(child, ast.expr):
                    lines = child.lineno, child.end_lineno or child.lineno
                    if name == "test" and isinstance(statement, ast.If):
                        for truth in (False, True):
                            yield _edit("if", child, ast.Constant(truth), _setter(statement, name, at), lines, inside)
                    if name == "value" and isinstance(statement, ast.Return) and _is_flag(child):
                        flipped = ast.Constant(not child.value)  # type: ignore[attr-defined]
                        yield _edit("flag", child, flipped, _setter(statement, name, at), lines, inside)
                    yield from _of_expression(child, _setter(statement, name, at), lines, inside)
                elif isinstance(child, ast.ExceptHandler):
                    yield from _of_statements(child.body, inside)
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from _of_statements(value, inside)


def _of_case(case: ast.match_case, function: str) -> Iterator[Edit]:
    lines = case.pattern.lineno, case.pattern.end_lineno or case.pattern.lineno
    put = _setter(case, "guard", None)
    words = f"case {_text(case.pattern)} never matches"
    yield Edit("case", case.pattern, words, lines, function, lambda: put(ast.Constant(False)))
    if case.guard is not None:
        if not _is_wildcard(case.pattern):
            yield Edit(
                "case", case.guard, f"case {_text(case.pattern)} without its guard", lines, function, _later(put, None)
            )
        yield from _of_expression(case.guard, put, lines, function)
    yield from _of_statements(case.body, function)


def _of_rules(statement: ast.stmt, function: str) -> Iterator[Edit]:
    """Rules are pairs of a sentence and a finder, in tuples that a module-level name holds."""
    if function or not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return
    told = ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else ""
    nothing = "()" if "Iterator" in told else "None"  # what a finder says who finds nobody
    for node in ast.walk(statement.value):
        if not isinstance(node, ast.Tuple) or not ("Rule[" in told or any(map(_is_rule, node.elts))):
            continue
        for at, rule in enumerate(node.elts):
            if isinstance(rule, ast.Tuple | ast.Name) and not _is_rule(node):
                idle = ast.parse(f"(({ast.unparse(rule)})[0], lambda *_: {nothing})", mode="eval").body
                lines = rule.lineno, rule.end_lineno or rule.lineno
                words = f"rule {_text(rule.elts[0] if isinstance(rule, ast.Tuple) else rule)} finds nobody"
                yield Edit("rule", rule, words, lines, function, _later(_setter(node, "elts", at), idle))


def _is_rule(node: ast.AST) -> bool:
    match node:
        case ast.Tuple(elts=[ast.Constant(value=str()), ast.Name() | ast.Lambda() | ast.Attribute()]):
            return True
    return False


def _is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_wildcard(pattern: ast.pattern) -> bool:
    return isinstance(pattern, ast.MatchAs) and pattern.pattern is None


def _is_flag(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _of_expression(
    node: ast.expr,
    put: Callable[[Any], object],
    lines: tuple[int, int],
    function: str,
    compared: ast.expr | None = None,
) -> Iterator[Edit]:
    for kind, new in _replacements(node):
        yield _edit(kind, node, new, put, lines, function)
    if compared is not None and isinstance(node, ast.Constant) and type(node.value) in (int, float):
        more, words = ast.Constant(node.value + 1), f"{_text(compared)}  with {node.value} + 1"  # type: ignore[operator]
        yield Edit("one", node, words, lines, function, _later(put, more))
    if not isinstance(node, ast.UnaryOp | ast.BinOp | ast.Tuple):
        compared = node if isinstance(node, ast.Compare) else None
    for name, value in ast.iter_fields(node):
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.comprehension):
                yield from _of_comprehension(child, lines, function)
            elif isinstance(child, ast.keyword):
                yield from _of_expression(child.value, _setter(child, "value", None), lines, function)
            elif isinstance(child, ast.expr):
                yield from _of_expression(child, _setter(node, name, at), lines, function, compared)


def _of_comprehension(node: ast.comprehension, lines: tuple[int, int], function: str) -> Iterator[Edit]:
    yield from _of_expression(node.iter, _setter(node, "iter", None), lines, function)
    for at, condition in enumerate(node.ifs):
        put = _setter(node, "ifs", at)
        yield _edit("keep", condition, ast.Constant(True), put, lines, function)
        yield from _of_expression(condition, put, lines, function)


def _replacements(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.BoolOp():
            for at in range(len(node.values)):
                rest = [*node.values[:at], *node.values[at + 1 :]]
                yield "and", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node.operand
        case ast.IfExp():
            yield "either", node.body
            yield "either", node.orelse
        case ast.Compare():
            for at, op in enumerate(node.ops):
                ops = [*node.ops[:at], OTHER[type(op)](), *node.ops[at + 1 :]]
                yield "is", ast.Compare(node.left, ops, node.comparators)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield "all", ast.Call(ast.Name(SWAPPED[name], ast.Load()), node.args, node.keywords)


def _edit(
    kind: str, old: ast.expr, new: ast.expr, put: Callable[[Any], object], lines: tuple[int, int], function: str
) -> Edit:
    return Edit(kind, old, f"{_text(old)}  ->  {_text(new)}", lines, function, _later(put, new))


def _later(put: Callable[[Any], object], new: ast.AST | None) -> Callable[[], object]:
    return lambda: put(new)


def _setter(owner: ast.AST, name: str, at: int | None) -> Callable[[Any], object]:
    if at is None:
        return lambda new: setattr(owner, name, new)
    return lambda new: getattr(owner, name).__setitem__(at, new)


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
