"""canonicalize: one spelling for views, casts, powers, copies and arguments, so that later passes match one form.

    before   x -> unsqueeze -> permute -> permute -> view([s0, 4, 8]) -> pow(2) -> sum(dim=[-1], keepdim=True)
    after    x -> permute -> view([-1, 4, 8]) -> mul(itself) -> sum([2], True)

No site, no refusal: a rewrite that is not provably free is not made. Values keep every bit, except that a NaN may
change its payload (torch's own kernels give NaN payloads by position). Shapes, strides and sharing stay as they are.

Tempting, and not done:
  x.to(bf16).to(fp32) -> x          rounds: a rounding point is part of the model
  x - y  -> x + (-y), x / c -> x * (1 / c)   the second rounds twice; the first buys nothing
  a + b -> b + a                    matchers look both ways
  clone of an input that is written later, or that is returned beside it: the copy is the meaning
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from math import prod
from typing import Any, cast

from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from v41._compat import OpOverload, equal_without_guards, fake_mode_of, known_equal, without_guards
from v41.passes.analysis.effects import bases, effect_of, written_args
from v41.passes.matching import VIEWS, aten, fake, prims, programs
from v41.report import Decision

COPIES = (aten.clone.default, aten._to_copy.default, prims.convert_element_type.default, aten.copy.default)
WITH_NUMBER = {  # op(Tensor, number) -> the same op that takes either; the kernel is the same
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
TAKES_NEW_AXIS = (aten.unsqueeze.default, aten.stack.default)  # their dim counts in the result


def canonicalize(gm: GraphModule) -> list[Decision]:
    """Respells `gm` and the subgraphs the model asked for, in place. There are no sites, so no decisions."""
    for program in programs(gm):
        memory = _Memory(program)
        for node in list(program.graph.nodes):
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                spell_arguments(node)
                for respell in RESPELL:
                    respell(node)
                _replace(node, _stand_in(node, memory))
    return []


class _Memory:
    """Whose memory is written or returned: there a copy, or a view of an input, must stay."""

    def __init__(self, gm: GraphModule) -> None:
        self.written = {base for node in gm.graph.nodes for arg in written_args(node) for base in bases(arg)}
        self.results = set(gm.graph.output_node().all_input_nodes)
        self.returned = {base for result in self.results for base in bases(result)}

    def may_share(self, copy: Node, source: Node) -> bool:
        """Whether nobody could tell if `copy` were its source. If it is returned, its source counts as returned now."""
        sources = bases(source)
        if copy in self.written or self.written.intersection(sources):
            return False
        if copy in self.returned:
            if any(source in self.returned or source.op != "call_function" for source in sources):
                return False
            self.returned.update(sources)
        return True


def _stand_in(node: Node, memory: _Memory) -> Node | None:
    """The operand that `node` equals in every bit and stride; None where it is more than that."""
    source = node.args[1 if node.target is aten.copy.default else 0] if node.args else None
    if not isinstance(source, Node) or not same_layout(fake(source), fake(node)):
        return None
    if node.target in VIEWS:
        return None if node in memory.results and source.op == "placeholder" else source
    return source if node.target in COPIES and memory.may_share(node, source) else None


def same_layout(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two fake tensors agree in dtype, device, shape, strides and offset, whatever their symbols stand for.

    Sizes that only a guard makes equal are not: torch would derive other expressions from the one than from the other.
    """
    if a is None or b is None or (a.dtype, a.device, a.ndim) != (b.dtype, b.device, b.ndim):
        return False
    ours, theirs = ((*value.shape, *value.stride(), value.storage_offset()) for value in (a, b))
    return all(map(equal_without_guards, ours, theirs))


def _replace(node: Node, stand_in: Node | None) -> None:
    if stand_in is not None:
        node.replace_all_uses_with(stand_in)
        _erase_unread(node)


def _erase_unread(node: Node) -> None:
    """Erases `node`, and then what only it read, as long as that is unread and has no effect."""
    if node.users or node.op in ("placeholder", "output") or effect_of(node) is not None:
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for read in inputs:
        _erase_unread(read)


# ---- arguments -------------------------------------------------------------------------------------------------------


def spell_arguments(node: Node) -> None:
    """Positional where the schema allows, defaults left out, dimensions counted from the front."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    positional = [argument for argument in schema if not argument.kwarg_only]
    given = dict(zip((argument.name for argument in positional), node.args, strict=False)) | dict(node.kwargs)
    ndim = _dimensions(node)
    values = {name: _from_front(name, value, ndim) for name, value in given.items()}
    for argument in schema:
        if argument.name in values and argument.has_default_value():
            default = _from_front(argument.name, argument.default_value, ndim)
            value = values[argument.name]
            if type(value) is type(default) and value == default:
                del values[argument.name]
    args: list[Any] = []
    last = max((i for i, argument in enumerate(positional) if argument.name in values), default=-1)
    for argument in positional[: last + 1]:
        args.append(values.pop(argument.name) if argument.name in values else argument.default_value)
    node.args, node.kwargs = tuple(args), values


def _dimensions(node: Node) -> int | None:
    """How many dimensions a `dim` argument of `node` counts in; None where it must be left alone."""
    if node.target in TAKES_NEW_AXIS or not node.args:
        return None
    first = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    counts = {value.ndim for value in map(fake, first) if value is not None}
    return max(counts.pop(), 1) if len(counts) == 1 else None


def _from_front(name: str, value: Any, ndim: int | None) -> Any:
    if ndim is None or name not in ("dim", "dims") or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value % ndim
    if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
        return [item % ndim for item in value]
    return value


# ---- respelling: each takes a node and, where it can prove the two alike, edits it in place --------------------------


def spell_number(node: Node) -> None:
    """x + 2 -> x + 2.0 on a floating x: torch converts the number to the kernel's float type either way."""
    if node.target in WITH_NUMBER and len(node.args) == 2:
        node.target = WITH_NUMBER[node.target]
    if node.target in WITH_NUMBER.values() and type(node.args[1]) is int and abs(node.args[1]) <= 2**24:
        value = fake(node.args[0])
        if value is not None and value.dtype.is_floating_point:
            node.update_arg(1, float(node.args[1]))


def spell_square(node: Node) -> None:
    """x ** 2 -> x * x: torch's kernels multiply for this exponent, on CPU and CUDA, in every floating dtype."""
    squares = node.target is aten.pow.Tensor_Scalar and node.args[1] in (2, 2.0)
    value = fake(node.args[0])
    if (squares or node.target is aten.square.default) and value is not None and value.dtype.is_floating_point:
        node.target, node.args = aten.mul.Tensor, (node.args[0], node.args[0])


def spell_cast(node: Node) -> None:
    """_to_copy(dtype=...) and nothing else -> convert_element_type, where both leave the layout as it is."""
    if node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        value, source = fake(node), fake(node.args[0])
        if value is not None and is_contiguous(source) and is_contiguous(value):
            node.target, node.args, node.kwargs = prims.convert_element_type.default, (node.args[0], value.dtype), {}


def spell_permute(node: Node) -> None:
    """t and transpose -> permute; a permute of a permute -> one."""
    value, args = fake(node), cast(Any, node.args)
    if value is None or node.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return
    order = list(range(value.ndim))
    if node.target is aten.t.default:
        order.reverse()
    elif node.target is aten.transpose.int:
        a, b = args[1:3]
        order[a], order[b] = order[b], order[a]
    else:
        order = [axis % value.ndim for axis in args[1]]
    source = args[0]
    if source.target is aten.permute.default:
        order = [source.args[1][axis] for axis in order]
        source = source.args[0]
        _read(node, source)
    node.target, node.args = aten.permute.default, (source, order)


def spell_view(node: Node) -> None:
    """The one symbolic size of a view -> -1; a reshape that copies nothing -> view; on contiguous memory, of what was
    there first."""
    value, source = fake(node), fake(node.args[0]) if node.args else None
    if node.target not in RESHAPING or value is None or source is None:
        return
    if node.target is aten.reshape.default and _is_view(source, value):
        node.target = aten.view.default
    numbers = [size for size in value.shape if not isinstance(size, SymInt)]
    if len(value.shape) - len(numbers) > 1 or prod(numbers) == 0:
        return
    if len(numbers) < len(value.shape) and not equal_without_guards(prod(source.shape), prod(value.shape)):
        return  # torch would work out another expression for -1
    base: Any = node.args[0]
    if is_contiguous(value) and is_contiguous(source):
        while base.target is aten.view.default and is_contiguous(fake(base.args[0])):
            base = base.args[0]
        _read(node, base)
    elif node.target is not aten.view.default:
        return
    sizes = [-1 if isinstance(size, SymInt) else size for size in value.shape]
    node.target, node.args, node.kwargs = aten.view.default, (base, sizes), {}


def _is_view(source: Tensor, value: Tensor) -> bool:
    """Whether `value` is what a view of `source` would be, whatever the sizes: a reshape that copies nothing."""
    mode = fake_mode_of([source])
    with mode or contextlib.nullcontext(), without_guards(mode):
        try:
            return same_layout(source.view(value.shape), value)
        except (RuntimeError, ValueError):  # the strides do not allow it, or nobody knows
            return False


def spell_expand(node: Node) -> None:
    """Sizes that expand leaves as they are -> -1."""
    value, source = fake(node), fake(node.args[0]) if node.args else None
    if node.target is aten.expand.default and value is not None and source is not None:
        new = value.ndim - source.ndim
        old = zip(source.shape, value.shape[new:], node.args[1][new:], strict=True)  # type: ignore[index, arg-type]
        kept = [-1 if equal_without_guards(before, after) else size for before, after, size in old]
        node.args = (node.args[0], [*node.args[1][:new], *kept])  # type: ignore[index, misc]


def is_contiguous(value: Tensor | None) -> bool:
    """Whether the strides are known to be the plain ones, those of dimensions of size 1 included."""
    if value is None:
        return False
    expected: int | SymInt = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not known_equal(stride, expected):
            return False
        expected = expected * size
    return True


def _read(node: Node, source: Any) -> None:
    """Lets `node` read `source` in place of its first operand, which goes if nobody else reads it."""
    old = node.args[0]
    if old is not source:
        node.update_arg(0, source)
        _erase_unread(old)  # type: ignore[arg-type]


RESHAPING = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
RESPELL: tuple[Callable[[Node], None], ...] = (
    spell_number,
    spell_square,
    spell_cast,
    spell_permute,
    spell_view,
    spell_expand,
)
