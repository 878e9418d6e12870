"""names: what a kernel calls things. A value is called after the body's node that it is part of, numbered if several
are."""

from __future__ import annotations

import re

import torch

from v41.lowering.rowwise.expr import Expr

TRITON = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.bool: "tl.int1",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
}
SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.bool: "bool", torch.int8: "i8",
         torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
         torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}  # fmt: skip
LONG = {"convert_element_type": "cast", "split_with_sizes": "split"}  # nodes whose names say more than they need
RESERVED = {"tl", "triton", "libdevice", "T", "tile", "part", "row", "lane", "live", "cols", "chunk", "step", "last",
            "arrived", "columns", "partials", "counters", "scratch", "first", "sub", "inside", "block", "sums", "total",
            "column", "depth", "across", "turn", "place", "mail"}  # fmt: skip


class Names:
    """Gives every expression one name, on first use; `alias` renames it from there on."""

    def __init__(self) -> None:
        self._of: dict[Expr, str] = {}
        self._count: dict[str, int] = {}

    def new(self, stem: str) -> str:
        stem = re.sub(r"\W", "_", stem)
        for long, short in LONG.items():
            stem = stem.replace(long, short)
        if stem in RESERVED or not stem.isidentifier():
            stem = f"v_{stem}"
        number = self._count.get(stem, 0)
        self._count[stem] = number + 1
        return f"{stem}_{number}"

    def __getitem__(self, expr: Expr) -> str:
        if expr.op == "const":
            return constant(expr.data[0])
        if expr not in self._of:
            self._of[expr] = self.new(expr.name)
        return self._of[expr]

    def alias(self, expr: Expr, name: str) -> None:
        self._of[expr] = name


def constant(value: object) -> str:
    text = repr(value)
    return f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else f"({text})" if text.startswith("-") else text
