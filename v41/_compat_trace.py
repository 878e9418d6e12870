"""functional_aten: Dynamo's graph through AOTAutograd, without the work that torch does once a call and need not.

    what torch does                                             what it does here
    runs a subgraph (nested_compile_region) for every call      once for operands of one layout
    traces how large every tensor's storage is, as it wraps it  computes it: no graph ever reads these nodes
    lets Python search all objects for cycles as they grow      only those that are young

The first two cost most where sizes are unbacked symbols and layers are many and alike. The graphs are the same but for
names.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule

from v41._compat import fake_mode_of, memory_of, name_of, shape_ids, symbols_of

NEVER = 2**31 - 1  # collections of middle-aged objects before all are searched


def functional_aten(
    gm: GraphModule,
    inputs: Sequence[object],
    inference: Callable[..., Any],
    training: Callable[..., Any],
    *,
    whole: Collection[str] = (),
) -> Any:
    """Dynamo's graph through AOTAutograd: `inference` turns a functional, decomposed graph into a boxed callable.

    `training` is called instead where gradients would flow. `whole`: names of ATen operators that are not decomposed.
    Returns what Dynamo is to run.
    """
    import torch._inductor.lowering  # noqa: F401  (the decompositions of pooling ask for it)
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    with _subgraphs_run_once(), _sizes_computed(), contextlib.ExitStack() as tracing:
        tracing.enter_context(young_garbage_alone())

        def traced(*graph: Any, **named: Any) -> Any:
            tracing.close()
            return inference(*graph, **named)

        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=training,
            inference_compiler=traced,
            decompositions={op: rule for op, rule in table.items() if getattr(op, "_opname", None) not in whole},
            keep_inference_input_mutations=True,
        )


@contextlib.contextmanager
def young_garbage_alone() -> Iterator[None]:
    """Under it, Python looks for cycles of garbage among young objects, and not among all there are.

    A graph of many layers is millions of objects that stay. Python searches all of them again whenever a quarter more
    are there, and finds nothing: a tenth of the time that tracing and passes take.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


@contextlib.contextmanager
def _subgraphs_run_once() -> Iterator[None]:
    """Under it, what a subgraph (nested_compile_region) returns is found once for operands of one layout.

    torch remembers this only for sizes that are no unbacked symbols; for these it runs the body again for every call,
    twice, and on some releases once more for the schema: most of the time of a model of many like layers.
    """
    from torch._higher_order_ops import utils
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph as op

    kind: Any = type(op)
    fakes: dict[Any, Any] = utils.registered_hop_fake_fns
    run, schema = fakes[op], kind.gen_schema
    results: dict[object, tuple[object, list[Tensor]]] = {}
    schemas: dict[object, tuple[object, Any]] = {}

    def body(subgraph: Any) -> Any:
        return getattr(subgraph, "subgraph", subgraph)  # of the functionalizing wrapper, new for every call

    def remembered_run(subgraph: Any, identifier: str, *operands: Any) -> Any:
        key = (id(body(subgraph)), *map(_layout, operands))
        if key in results:
            return tuple(_like(value) for value in results[key][1])
        found = run(subgraph, identifier, *operands)
        if _follows_from(found, operands):
            results[key] = body(subgraph), list(found)  # the subgraph lives on, so its id stays its own
        return found

    def remembered_schema(self: Any, subgraph: Any, identifier: str, *operands: Any) -> Any:
        key = (id(body(subgraph)), *map(type, operands))
        if key not in schemas:
            schemas[key] = body(subgraph), schema(self, subgraph, identifier, *operands)
        return schemas[key][1]

    fakes[op], kind.gen_schema = remembered_run, remembered_schema
    try:
        yield
    finally:
        fakes[op], kind.gen_schema = run, schema


@contextlib.contextmanager
def _sizes_computed() -> Iterator[None]:
    """Under it, AOTAutograd's wrapper of a tensor is made without tracing the arithmetic of its own sizes.

    The wrapper asks for the bytes of its storage: five or so operations on symbols, each of which would become a node
    that nothing reads and that is thrown away in the end. A quarter of AOTAutograd's time.
    """
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

    kind: Any = FunctionalTensor
    make = kind.__new__

    def made(cls: Any, *arguments: Any) -> Any:
        if get_proxy_mode() is None:
            return make(cls, *arguments)
        with disable_proxy_modes_tracing():
            return make(cls, *arguments)

    kind.__new__ = made
    try:
        yield
    finally:
        kind.__new__ = make


def _layout(value: object) -> object:
    """Equal for operands that a body cannot tell apart while it is traced."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, _exprs(value.shape), _exprs(value.stride()), _exprs([value.storage_offset()])
    return (type(value), *_exprs([value])) if isinstance(value, (int, SymInt)) else id(value)


def _exprs(sizes: Sequence[Any]) -> tuple[object, ...]:
    return tuple(size.node.expr if isinstance(size, SymInt) else size for size in sizes)


def _follows_from(results: object, operands: Sequence[object]) -> bool:
    """Whether `results` are new plain tensors whose sizes say nothing that those of `operands` do not."""
    if not isinstance(results, (tuple, list)) or not all(isinstance(value, Tensor) for value in results):
        return False

    def symbols(values: Sequence[Any]) -> set[str]:
        sizes = [[*v.shape, *v.stride()] if isinstance(v, Tensor) else [v] for v in values]
        return {name for size in chain(*sizes) if isinstance(size, (int, SymInt)) for name in symbols_of(size)}

    own = {memory_of(value) for value in results}
    others = {memory_of(value) for value in operands if isinstance(value, Tensor)}
    apart = len(own) == len(results) and own.isdisjoint(others)
    plain = all(fake_mode_of([value]) is not None and not value.storage_offset() for value in results)
    return apart and plain and symbols(results) <= symbols(operands)


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def mark_rows(tensor: Tensor, size: str = "rows") -> None:
    """Dynamo takes dimension 0 of `tensor` for any number of rows, or of what `size` names, as a Batch's."""
    torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id=size)


def inputs_called(gm: GraphModule) -> dict[str, str]:
    """Input -> what the user calls it, of the graph that Inductor is given; {} where that cannot be told.

    AOTAutograd hands on all tensors of Dynamo's graph, in order, under names of its own. Dynamo keeps what it called
    each tensor that it saw; where it dropped one of these as unread, nobody says which.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)]
    seen = _tensors_seen()
    alike = len(inputs) == len(seen) and all(
        value.dtype == fake.dtype and [*map(str, value.shape)] == [*map(str, fake.shape)]
        for value, (fake, _) in zip((node.meta["val"] for node in inputs), seen, strict=True)
    )
    return {node.name: name for node, (_, name) in zip(inputs, seen, strict=True)} if alike else {}


def told_of_inputs() -> list[str]:
    """What `inputs_called` may go by, and the names that `mark_unbacked` gave sizes; no cache of torch's knows them."""
    seen = _tensors_seen()
    sizes = shape_ids([fake for fake, _ in seen])
    return [*(name for _, name in seen), *(f"{symbol} {sizes[symbol]}" for symbol in sorted(sizes))]


def _tensors_seen() -> list[tuple[Tensor, str]]:
    """The tensors that Dynamo made inputs of in the compile at hand, and what the user calls them."""
    from torch._guards import TracingContext

    mode = getattr(TracingContext.try_get(), "fake_mode", None)
    tracked = getattr(getattr(mode, "shape_env", None), "tracked_fakes", None) or ()
    seen = [(each.fake, name_of(each.source)) for each in tracked if isinstance(each.fake, Tensor)]
    return [(fake, name) for fake, name in seen if not name.endswith("._base")]  # of a view: seen, and no input
