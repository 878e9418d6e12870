"""lines: the text of a kernel in passes, line by line, and how one expression of it is written."""

from __future__ import annotations

import torch

from v41.lowering.rowwise.elementwise import TEXT
from v41.lowering.rowwise.expr import Expr
from v41.lowering.rowwise.names import TRITON, Names
from v41.lowering.rowwise.phases import Place
from v41.lowering.rowwise.read import Program


class Lines:
    """Text so far; `program` is what it is of."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = Names()
        self.lines: list[str] = []
        self.indent = 1

    def say(self, *lines: str) -> None:
        self.lines += ["    " * self.indent + line if line else "" for line in lines]

    def _text(self, expr: Expr, masked: bool = False) -> str:
        names = [self.names[arg] for arg in expr.args]
        if expr.op == "load":
            return self._load(expr, masked)
        if expr.op == "cast":
            return (
                f"{names[0]}.to({TRITON[expr.dtype]})"
                if expr.args[0].op != "const"
                else f"tl.full([1, 1], {names[0]}, {TRITON[expr.dtype]})"
            )
        return TEXT[expr.op].format(**dict(zip("abc", names, strict=False)))

    def _load(self, expr: Expr, masked: bool) -> str:
        source, row, offset, column = expr.data
        tensor = self.program.inputs[int(str(source))]
        assert tensor is not None
        terms = [f"{tensor.name}_ptr"] + ([f"row * {row}"] if row else []) + ([str(offset)] if offset else [])
        if column:
            terms.append(times("cols", int(str(column))))
        guards = ["live"] * bool(row) + ["columns"] * bool(column and masked)
        guard = f", mask={' & '.join(guards)}, other={'0.0' if expr.dtype.is_floating_point else '0'}" if guards else ""
        text = f"tl.load({' + '.join(terms)}{guard})"
        if not row or column:
            return text
        return f"settle({text}.to(tl.int32)) != 0" if expr.dtype == torch.bool else f"settle({text})"

    def _address(self, place: Place) -> str:
        if place.output is None:
            base = f"scratch_{place.slot}_ptr"
        else:
            base = f"{self.program.outputs[place.output][0].name}_ptr"
        return f"{base} + row * {place.stride}" + (f" + {place.offset}" if place.offset else "")


def times(name: str, factor: int) -> str:
    return name if factor == 1 else f"{name} * {factor}"
