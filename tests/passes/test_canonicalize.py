"""canonicalize keeps every bit, leaves one spelling, and touches neither a rounding point nor a copy that matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, ops
from torch.fx import GraphModule

from tests.invariants import check_fired_share, check_pass
from tests.strategies.programs import CHANGES, NO_OPS, Program, build, programs
from tests.strategies.tracing import trace
from v41.passes.canonicalize import canonicalize
from v41.passes.structure import structure_key

aten, prims = ops.aten, ops.prims
BF16 = torch.bfloat16


def spell(fn: Callable[..., Any], *rows: Tensor, backed: bool = False) -> Counter[Any]:
    """Traces `fn`, canonicalizes it under all checks, and counts the operators left."""
    gm = trace(fn, *rows, backed=backed)
    assert check_pass(canonicalize, gm) == []
    return operators(gm)


def operators(gm: GraphModule) -> Counter[Any]:
    silent = (aten._assert_scalar.default,)
    called = [n.target for n in gm.graph.nodes if n.op == "call_function" and n.target not in silent]
    return Counter(target for target in called if isinstance(target, torch._ops.OpOverload))


def matrix(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 4, 4).to(dtype)


def test_keeps_every_bit_of_any_program() -> None:
    fired: list[bool] = []

    @given(programs, st.sampled_from([torch.float32, BF16]), st.booleans())
    def draw(program: Program, dtype: torch.dtype, backed: bool) -> None:
        gm = trace(build(program), matrix(dtype), backed=backed)
        before, key = operators(gm), structure_key(gm)
        check_pass(canonicalize, gm)
        after = operators(gm)
        fired.append(structure_key(gm) != key)
        assert after.total() <= before.total()
        assert not {aten._unsafe_view.default, aten.t.default, aten.transpose.int} & after.keys()
        assert after[aten.pow.Tensor_Scalar] == [name for name, _ in program].count("cube")

    draw()
    check_fired_share(fired)


@given(st.lists(st.sampled_from(["cube", "from one", "negated", "times itself", "twice more"]), min_size=1, max_size=4))
def test_what_is_spelled_so_stays_as_it_is(names: list[str]) -> None:
    gm = trace(build([(name, False) for name in names]), matrix())
    before = structure_key(gm)
    assert check_pass(canonicalize, gm) == [] and structure_key(gm) == before


@given(st.lists(st.sampled_from(sorted(NO_OPS)), min_size=1, max_size=5), st.sampled_from(sorted(CHANGES)))
def test_no_ops_leave_the_program_as_it_is_without_them(names: list[str], change: str) -> None:
    with_them = [(name, False) for name in names]
    padded, plain = (trace(build(p), matrix()) for p in ([*with_them, (change, False)], [(change, False)]))
    check_pass(canonicalize, padded)
    check_pass(canonicalize, plain)
    assert structure_key(padded) == structure_key(plain)


SPELLINGS: dict[str, list[Callable[[Tensor], Any]]] = {  # all of a list end as the same program
    "square": [lambda x: x.square(), lambda x: x**2, lambda x: x.pow(2.0), lambda x: x * x],
    "sum": [lambda x: x.sum(-1), lambda x: x.sum([2]), lambda x: torch.sum(x, dim=2, keepdim=False)],
    "transpose": [lambda x: x.mT + 1, lambda x: x.transpose(-1, 1) + 1.0, lambda x: x.permute(0, -1, 1) + 1],
    "view": [
        lambda x: x.reshape(-1, 16) + 1,
        lambda x: x.flatten(1) + 1,
        lambda x: x.unsqueeze(0).view(x.shape[0], 16) + 1,
        lambda x: x.view(-1, 2, 8).flatten(1) + 1,
    ],
    "number": [lambda x: x * 2, lambda x: 2.0 * x, lambda x: torch.mul(x, 2.0)],
    "split": [lambda x: x.split((1, 3), -1)[1] + 1, lambda x: x.split((1, 3), 2)[1] + 1],
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("backed", [False, True])
def test_spellings_meet(name: str, backed: bool) -> None:
    keys = []
    for spelling in SPELLINGS[name]:
        gm = trace(spelling, matrix(), backed=backed)
        check_pass(canonicalize, gm)
        keys.append(structure_key(gm))
    assert len(set(keys)) == 1


def test_a_bf16_round_trip_is_a_rounding_point() -> None:
    left = spell(lambda x: x.to(BF16).to(torch.float32) + 1, matrix())
    assert left[prims.convert_element_type.default] == 2
    left = spell(lambda x: x.to(torch.float32).to(BF16) + 1, matrix(BF16))
    assert left[prims.convert_element_type.default] == 2


@pytest.mark.parametrize(("op", "axes"), [(aten.transpose.int, (0, -1)), (aten.t.default, ())])
def test_a_transpose_that_nobody_decomposed_is_a_permute(op: Any, axes: tuple[int, ...]) -> None:
    gm = trace(lambda x: x.permute(1, 0) + 1, torch.randn(5, 4))
    (node,) = (node for node in gm.graph.nodes if node.target is aten.permute.default)
    node.target, node.args = op, (node.args[0], *axes)
    check_pass(canonicalize, gm)
    assert (node.target, node.args[1:]) == (aten.permute.default, ([1, 0],))


def reshaping(fn: Callable[[Tensor], Any]) -> tuple[GraphModule, Any]:
    """`fn` traced, with a reshape in place of its last view, of what the view's copy copies if it reads one."""
    gm = trace(fn, matrix())
    node = [node for node in gm.graph.nodes if node.target in (aten.view.default, aten._unsafe_view.default)][-1]
    source = node.args[0]
    node.target = aten.reshape.default
    if source.target is aten.clone.default:
        node.update_arg(0, source.args[0])
        gm.graph.erase_node(source)
    return gm, node


@pytest.mark.parametrize(
    ("fn", "target"),
    [
        (lambda x: x.mT.unflatten(1, (2, 2)) + 1, aten.view.default),
        (lambda x: x.mT.unsqueeze(1).expand(-1, x.shape[0], -1, -1).unflatten(2, (2, 2)) + 1, aten.view.default),
        (lambda x: x.mT.flatten(1) + 1, aten.reshape.default),
    ],
    ids=["of memory in another order", "of two symbols", "that copies"],
)
def test_a_reshape_is_a_view_where_it_copies_nothing(fn: Callable[[Tensor], Any], target: Any) -> None:
    gm, node = reshaping(fn)
    check_pass(canonicalize, gm)
    assert node.target is target and (target is aten.reshape.default or operators(gm)[aten.reshape.default] == 0)


def test_an_expand_that_a_guard_makes_a_no_op_stays() -> None:
    def within_chunks(x: Tensor) -> Tensor:
        """Products of the rows of each chunk of four; here one chunk, and the product is compiled for one."""
        chunks = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4)).reshape(2, 2, -1, 4, 2)
        return chunks @ chunks.transpose(-1, -2)

    gm = trace(within_chunks, torch.randn(3, 8), backed=True)
    check_pass(canonicalize, gm, rows=(1, 4))
    assert operators(gm)[aten.expand.default] == 2


def test_other_powers_and_integer_powers_stay() -> None:
    assert spell(lambda x: (x**3, x**0.5), matrix())[aten.pow.Tensor_Scalar] == 2
    assert spell(lambda x: x.long() ** 2, matrix())[aten.pow.Tensor_Scalar] == 1


def test_alpha_and_large_integers_stay() -> None:
    gm = trace(lambda x: (torch.add(x, x, alpha=3), x + (2**24 + 1)), matrix())
    check_pass(canonicalize, gm)
    first, second = (n for n in gm.graph.nodes if n.target is aten.add.Tensor)
    assert first.kwargs == {"alpha": 3} and second.args[1] == 2**24 + 1


COPIES_THAT_MATTER: dict[str, Callable[[Tensor], Any]] = {
    "of an input that is returned": lambda x: x.clone(),
    "of a view of an input": lambda x: x.view(-1, 16).clone(),
    "of a result that is returned beside it": lambda x: (y := x + 1, y.clone()),
    "twice of one result": lambda x: ((y := x + 1).clone(), y.clone()),
    "into another order of memory": lambda x: x.mT.contiguous() + 1,
}


@pytest.mark.parametrize("name", COPIES_THAT_MATTER)
def test_keeps_a_copy(name: str) -> None:
    assert spell(COPIES_THAT_MATTER[name], matrix())[aten.clone.default] >= 1


def test_keeps_a_copy_of_what_is_written_later() -> None:
    def step(cache: Tensor, x: Tensor) -> Tensor:
        old = cache.clone()
        cache.add_(x)
        return old

    gm = trace(step, matrix(), matrix())
    check_pass(canonicalize, gm)
    assert operators(gm)[aten.clone.default] == 1


def test_drops_copies_that_nobody_can_tell_from_their_source() -> None:
    assert spell(lambda x: x.clone() + 1, matrix())[aten.clone.default] == 0
    assert spell(lambda x: (x + 1).clone(), matrix())[aten.clone.default] == 0


def test_subgraphs_of_the_model_are_spelled_too() -> None:
    @torch.compiler.nested_compile_region
    def inner(x: Tensor) -> Tensor:
        return x.flatten(1).unflatten(1, (4, 4)) ** 2

    gm = trace(lambda x: inner(x) + inner(x + 1), matrix())
    check_pass(canonicalize, gm)
    (body,) = {child for child in gm.children() if isinstance(child, GraphModule)}
    assert operators(body) == {aten.mul.Tensor: 1}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64, torch.float16])
@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
def test_torch_squares_by_multiplying(dtype: torch.dtype, device: str) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limits = torch.iinfo(bits)
    x = torch.randint(limits.min, limits.max, (1 << 20,), dtype=bits).view(dtype).to(device)
    x = x[~x.isnan()]  # payloads of NaNs differ, with their place in memory
    for part in (x, x[:33], x[::3]):
        assert torch.equal((part**2).view(bits), (part * part).view(bits))
