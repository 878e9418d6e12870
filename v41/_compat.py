"""All that is private to torch or differs between its releases. Features are detected, versions never compared."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from v41 import _compat_barriers


def inductor_settings(settings: dict[str, object]) -> dict[str, object]:
    """Those of `settings` (dotted names of torch._inductor.config) that this torch knows."""
    from torch._inductor import config

    def known(name: str) -> bool:
        target: object = config
        for part in name.split("."):
            if not hasattr(target, part):
                return False
            target = getattr(target, part)
        return True

    return {name: value for name, value in settings.items() if known(name)}


def inductor_keeps_explicit_casts() -> bool:
    """Whether `emulate_precision_casts` reaches an explicit `.to(bf16)`; where not, generated C++ drops the cast."""
    from torch._inductor import lowering

    return "use_compute_types" in inspect.signature(lowering.to_dtype).parameters


def keep_rounding_of(node: Node) -> None:
    """Tells Inductor, under `emulate_precision_casts`, to round what `node` reads and returns as eager does.

    Tracing sets this mark only if that setting was on while AOTAutograd ran; nodes that a pass made never have it.
    """
    node.meta["low_precision_pointwise_barrier"] = True


def keep_output_strides(graph: Graph) -> None:
    """Tells Inductor that every output must come with the strides its meta says."""
    output = graph.output_node()
    results: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = [i for i, result in enumerate(results) if isinstance(result, Node)]


def run_as_eager(node: Node) -> None:
    """Tells Inductor to call eager's own kernel for `node`."""
    node.meta["should_fallback"] = True


def inductor_compile(
    gm: GraphModule, inputs: Sequence[Any], settings: dict[str, object], mark: Callable[[Graph], None], known: str = ""
) -> Callable[[list[Any]], Sequence[Any]]:
    """The post-grad half of Inductor alone, on functional ATen. The result empties the list of inputs it is given.

    `mark` marks nodes just before they are lowered; `known` tells what is known of sizes meanwhile. Inductor's cache
    sees neither, so the source of `mark`'s file, of this one and `known` go into its key. A fresh TracingContext keeps
    AOTAutograd's one, if we run inside it, from taking a piece's output strides for its own.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    sources = (Path(__file__), Path(_compat_barriers.__file__), Path(inspect.getsourcefile(mark) or __file__))
    key = hashlib.sha256(b"".join([*(source.read_bytes() for source in sources), known.encode()])).hexdigest()
    settings = {**settings, "post_grad_custom_pre_pass": custom_graph_pass(mark, lambda: key)}
    fresh = tracing(TracingContext(detect_fake_mode(inputs)))
    with fresh, config.patch(settings), _whole(gm), _compat_barriers.loops_wait():
        return compile_fx_inner(gm, list(inputs), is_inference=True)


def custom_graph_pass(run: Callable[[Graph], None], key: Callable[[], str | None]) -> Any:
    """`run` as Inductor takes a pass of the user's. Its caches hold what they store by `key()`; None: not stored."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            run(graph)

        def uuid(self) -> str | None:
            return key()

    return Pass()


def sort_nodes(graph: Graph) -> None:
    """Puts every node behind what it reads, and moves no other: Inductor's own passes leave that to a later sort."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


@contextlib.contextmanager
def _whole(gm: GraphModule) -> Iterator[None]:
    """Lets operators that were kept whole run eager's kernel: Inductor expects their decomposition and refuses them."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import force_fallback, lowerings

    kept = dict.fromkeys(node.target for node in gm.graph.nodes if isinstance(node.target, OpOverload))
    with contextlib.ExitStack() as stack:
        for op in kept:
            if op in decompositions and op not in lowerings:
                stack.enter_context(force_fallback(op))
        yield


def as_python(size: int | SymInt) -> str:
    """A size as a Python expression over the names of its symbols."""
    return str(size) if isinstance(size, int) else _printed(size.node.expr)


@functools.lru_cache(4096)
def _printed(expr: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expr))


def symbols_of(size: int | SymInt | SymFloat | SymBool) -> frozenset[str]:
    """Names of the symbols in a size, or in another number or a bool that a trace knows by symbols."""
    return frozenset() if isinstance(size, int) else frozenset(str(symbol) for symbol in size.node.expr.free_symbols)


def lazy_graph_module(root: torch.nn.Module | dict[str, Any], graph: Graph) -> GraphModule:
    """A GraphModule whose Python code is generated when it is asked for: most are only read. At once where not."""
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return GraphModule(root, graph)
    return _LazyGraphModule(root, graph)


def shape_ids(values: Sequence[object]) -> dict[str, str]:
    """Symbol -> the `shape_id` that `mark_unbacked` gave it, as far as torch tells for these fake values."""
    shapes: Any = getattr(fake_mode_of(values), "shape_env", None)
    marked = getattr(shapes, "_shape_id_to_unbacked_symbol", {})
    return {str(shapes.replace(symbol)): name for name, symbol in marked.items()}


def known_equal(*sizes: int | SymInt) -> bool:
    """Whether the sizes are equal whatever their symbols are. False where that is not known; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(statically_known_true(sizes[0] == size) for size in sizes[1:])


def equal_without_guards(a: int | SymInt, b: int | SymInt) -> bool:
    """Whether two sizes are equal whatever this compile guards on: then what torch derives from either is the same."""
    equal: Any = a == b
    if isinstance(equal, bool) or not known_equal(a, b):
        return equal is True
    return bool(equal.node.shape_env._maybe_evaluate_static(equal.node.expr, axioms=()))


def graph_break(gm: GraphModule) -> str | None:
    """Why Dynamo ended this graph before the function did, with the user's line; None where it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = list(getattr(reason, "user_stack", None) or ())
    at = (
        f"{'/'.join(stack[-1].filename.split('/')[-2:])}:{stack[-1].lineno}  {stack[-1].line}".rstrip()
        if stack
        else "unknown"
    )
    return f"{str(reason.reason).strip().splitlines()[0]}\n  at   {at}"


def times_compiled_before() -> int:
    """How often Dynamo had already compiled the frame it compiles now: above 0, this is a recompile."""
    from torch._guards import CompileContext

    now = CompileContext.current_compile_id()
    return (now.frame_compile_id or 0) if now is not None else 0


def outputs_rebuilt_from_inputs(count: int) -> frozenset[int]:
    """Which of `count` graph outputs AOTAutograd replaces by (a view of) an input: those are never handed out."""
    from torch._guards import TracingContext

    known = getattr(TracingContext.try_get(), "fw_metadata", None)
    infos = getattr(known, "output_info", None) or ()
    first = getattr(known, "num_mutated_inp_runtime_indices", 0)  # values of inputs that are copied back outside
    if first + len(infos) > count:
        return frozenset()
    aliases = ("alias_of_input", "is_input")
    return frozenset(first + i for i, info in enumerate(infos) if info.output_type.name in aliases)


def fake_mode_of(values: Sequence[object]) -> Any:
    """The FakeTensorMode of the first fake tensor among `values`, or None."""
    return next(
        (value.fake_mode for value in values if isinstance(value, Tensor) and hasattr(value, "fake_mode")), None
    )


def without_storage() -> contextlib.AbstractContextManager[Any]:
    """Under it, new tensors have a shape and a dtype and no memory, even those computed from real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Under it, operators compute though AOTAutograd has a FakeTensorMode on: passes may try expressions on numbers."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def outside_of_tracing() -> contextlib.AbstractContextManager[Any]:
    """Under it nothing knows of the trace in progress, so that something else can be compiled and run meanwhile."""
    from torch._guards import tracing

    stack = contextlib.ExitStack()
    stack.enter_context(tracing(None))
    stack.enter_context(real_tensors())
    return stack


def without_guards(fake_mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Under it, recomputing meta neither adds a guard nor leaves a fresh unbacked symbol pending."""
    stack = contextlib.ExitStack()
    shapes = getattr(fake_mode, "shape_env", None)
    if shapes is not None:
        stack.enter_context(shapes.suppress_guards())
        stack.enter_context(shapes.ignore_fresh_unbacked_symbols())
    return stack


SUBSYSTEM = "v41"  # what torch's bisector calls our passes


def observed(gm: GraphModule, name: str, run: Callable[[GraphModule], Any]) -> Any:
    """Runs a pass where torch's bisector, `disabled_passes` and timers see it. None where they switched it off.

    To bisect a program that names backend="v41", torch._inductor.config.test_configs must keep a backend of the user's
    (bisect_keep_custom_backend_for_inductor).
    """
    from torch._inductor.compiler_bisector import BACKENDS, BisectSubsystem
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    subsystems = BACKENDS["inductor"]  # the one backend whose passes the bisector tells apart
    if all(each.name != SUBSYSTEM for each in subsystems):
        subsystems.append(BisectSubsystem(SUBSYSTEM))
    return GraphTransformObserver(gm, name, SUBSYSTEM).apply_gm_pass(run)


def without_passes(names: str) -> contextlib.AbstractContextManager[Any]:
    """Under it, torch switches passes of these names off, with commas between; none for ""."""
    from torch._inductor import config

    return config.patch(disabled_passes=names)


def renamed(size: SymInt | SymFloat | SymBool, names: dict[str, str]) -> str:
    """The expression of `size` with its symbols called as `names` says."""
    from sympy import Symbol  # type: ignore[import-untyped]

    expr = size.node.expr
    return str(expr.xreplace({symbol: Symbol(names[str(symbol)]) for symbol in expr.free_symbols}))


def symbol_facts(size: SymInt | SymFloat | SymBool) -> dict[str, str]:
    """Symbol of `size` -> what a compiler may use: its range; the name of a backed one, which can be guarded on."""
    shapes = size.node.shape_env
    facts = {}
    for symbol in size.node.expr.free_symbols:
        bounds = shapes.var_to_range.get(symbol)
        known = f"{bounds.lower}..{bounds.upper}" if bounds is not None else "?"
        facts[str(symbol)] = known if shapes.is_unbacked_symint(symbol) else f"{symbol} in {known}"
    return facts


def input_name(placeholder: Node) -> str:
    """What the user calls a Dynamo input: "layers.0.wq.weight" where it is a parameter, else the argument's name."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return name_of(source) if source is not None else placeholder.name


def name_of(source: Any) -> str:
    """What the user calls the input that Dynamo has from `source`."""
    text = str(source.name() if callable(source.name) else source.name)
    text = re.sub(r"L\['(\w+)'\]", r"\1", text)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text).removeprefix("self.")


def outside_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Under it, tensors are real though a FakeTensorMode may be active around."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def size_with(size: int | SymInt, value: int) -> int:
    """A size as a number, with `value` for every symbol in it."""
    if not isinstance(size, SymInt):
        return int(size)
    import sympy

    expr = size.node.expr
    return int(expr.xreplace({symbol: sympy.Integer(value) for symbol in expr.free_symbols}))


def content_of(constant: Tensor) -> bytes | None:
    """The bytes of a constant that a graph holds, though a FakeTensorMode may be active; None if it is fake itself."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    if isinstance(constant, FakeTensor):
        return None
    with unset_fake_temporarily():
        flat = constant.detach().cpu().contiguous().flatten()
        return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


def memory_of(value: Tensor) -> object:
    """Equal for tensors that share memory, fake ones too."""
    return value.untyped_storage()._cdata


def copy_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Each of `values` into its place in `into`: one launch a dtype instead of one a tensor."""
    torch._foreach_copy_(list(into), list(values))


def addresses_of(values: Sequence[Any], places: Sequence[int]) -> list[int | None]:
    """The address of the tensor at each of `places`, None elsewhere: what `same_addresses` compares with."""
    found: list[int | None] = [None] * len(values)
    for place in places:
        found[place] = values[place].data_ptr()
    return found


def same_addresses(values: list[Any], addresses: list[int | None], places: list[int]) -> bool:
    """Whether the tensors at `places` still lie at `addresses`. False for no addresses."""
    if len(addresses) != len(values):
        return False
    compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # a loop in C++, in CUDA builds
    if compare is not None:
        return bool(compare(values, addresses, places))
    return all(values[place].data_ptr() == addresses[place] for place in places)


def mark_static_address(value: Tensor) -> None:
    """Tells Inductor's CUDA graphs that an input stays where it is, so that they need not copy it."""
    torch._dynamo.mark_static_address(value)


def without_ownership(value: Tensor) -> Tensor:
    """A tensor of the same memory that does not keep it: for memory that something else keeps, a graph's pool."""
    owner = value.untyped_storage()
    construct = torch._C._construct_storage_from_data_pointer
    borrowed = construct(owner.data_ptr(), value.device, owner.nbytes())
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(borrowed, value.storage_offset(), value.shape, value.stride())


def modes_around() -> tuple[object, ...]:
    """What a compiled step depends on beside its arguments and its model: gradients, inference, autocast, the default
    dtype, whether operators must be deterministic."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_any_autocast_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._len_torch_function_stack(),
    )


def on_registration(call: Callable[[Any], None]) -> Callable[[], None]:
    """`call` gets every module in which a parameter, buffer or module is registered. Returns what ends that."""
    from torch.nn.modules import module as modules

    def hook(module: Any, name: str, value: Any) -> None:
        call(module)

    handles = [
        register(hook)
        for register in (
            modules.register_module_parameter_registration_hook,
            modules.register_module_buffer_registration_hook,
            modules.register_module_module_registration_hook,
        )
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
