"""algebra: what is known of sizes whatever their symbols are, and what torch says of them is said again."""

from __future__ import annotations

import torch
from sympy import Max, Min, Symbol
from torch import SymInt, Tensor
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41.passes.analysis.algebra import ONE, expression, multiple, product, sizes

T, R, Q = (Symbol(name, integer=True, nonnegative=True) for name in "TRQ")


def test_a_multiple_is_one_for_every_number() -> None:
    always = (T * 8, T), (T * 8, expression(4)), (T, T), (expression(8), ONE), (expression(0), expression(0))
    assert [multiple(*each) for each in always] == [True] * 5
    not_always = (T, T * 8), (T * R, Q), (T + 4, expression(4)), (T, expression(0)), (expression(8), expression(3))
    assert [multiple(*each) for each in not_always] == [False] * 5
    assert product((T, expression(2), T)) == 2 * T**2 and product(()) == 1


def program() -> GraphModule:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, y]).repeat(2, 1), x[: y.shape[0] // 2]

    return trace(run, torch.rand(6, 4), torch.rand(5, 4), sizes=("rows", "others"))


def test_sizes_of_a_program_are_symbols_of_whole_numbers_and_what_is_made_of_them() -> None:
    x, y = (node for node in program().graph.nodes if node.op == "placeholder" and sizes_of(node))
    output = program().graph.output_node()
    (rows, width), (others, _) = sizes(x), sizes(y)
    assert isinstance(rows, Symbol) and rows.is_integer and rows.is_nonnegative and width == 4
    assert rows != others and {str(rows), str(others)} == {str(n.meta["val"].shape[0]) for n in (x, y)}
    twice, part = (sizes(node)[0] for node in output.args[0])
    assert twice == 2 * (rows + others)
    found = [part.subs({rows: 6, others: count}) for count in (5, 30)]
    assert found == [2, 6] and part.atoms(Min, Max)


def sizes_of(node: object) -> bool:
    value = node.meta["val"]  # type: ignore[attr-defined]
    return isinstance(value, Tensor) and isinstance(value.shape[0], SymInt)
