"""fuse: a product read by one sum alone becomes a fused multiply-add, written out.

    before   sum(mul(a, x), mul(b, y), mul(c, z))      add(mul(a, x), c)      sum(p, q, r, s)
    after    fma(c, z, fma(b, y, mul(a, x)))           fma(a, x, c)           add(add(p, q), add(r, s))

Sums of products go one after the other, other sums in pairs, whatever the tile. Kernels are compiled with the
compiler's own contraction off, so the bits are those of the text. Where it fuses, one rounding less than eager.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from v41.lowering.rowwise.expr import Builder, Expr, reachable, uses
from v41.lowering.rowwise.read import Program


def fuse(program: Program) -> Program:
    """`program` with products fused into sums, and without what no output needs."""
    roots = [item for _, value in program.outputs for item in value.items()]
    order = reachable(roots, program.builder.order)
    count = uses(order, roots)
    absorbed = {product for total in order for product in _lone_products(total, count)}
    builder, new = Builder(), dict[Expr, Expr]()
    for expr in order:
        builder.name = expr.name
        if expr not in absorbed:
            new[expr] = _rebuild(builder, expr, absorbed, new)
    out = replace(program, builder=builder, outputs=[])
    for tensor, value in program.outputs:
        elements = np.empty(value.elements.shape, dtype=object)
        for index in np.ndindex(elements.shape):
            elements[index] = new[value.elements[index]]
        out.outputs.append((tensor, replace(value, elements=elements)))
    return out


def _lone_products(total: Expr, count: Counter[Expr]) -> list[Expr]:
    """The operands of `total` that are products nobody else reads, all but one to start from; none where a sum has
    others."""
    lone = [arg for arg in total.args if arg.op == "mul" and count[arg] == 1]
    if total.op == "sum":
        return lone[1:] if len(lone) == len(total.args) else []
    return lone[-1:] if total.op == "add" else []


def _rebuild(builder: Builder, expr: Expr, absorbed: set[Expr], new: dict[Expr, Expr]) -> Expr:
    if expr.op not in ("add", "sum"):
        return builder.make(
            expr.op, tuple(new[arg] for arg in expr.args), expr.dtype, *expr.data, row=expr.row, wide=expr.wide
        )
    products = [arg for arg in expr.args if arg in absorbed]
    items = [new[arg] for arg in expr.args if arg not in absorbed]
    while len(items) > 1:
        pairs = [builder.apply("add", *items[i : i + 2]) for i in range(0, len(items) - 1, 2)]
        items = pairs + items[len(items) // 2 * 2 :]
    total = items[0]
    for product in products:
        total = builder.apply("fma", *(new[arg] for arg in product.args), total)
    return total
