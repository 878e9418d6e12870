"""What the artifact cache needs of torch's private parts: AOTAutograd's result, Inductor's, and what both depend on.

AOTAutograd wraps a compiled graph: it restores aliases, drops what was only traced, sets modes. torch's own cache can
pickle these wrappers, and this file uses just that. torch's cache itself is not used: its key knows nothing of passes,
it holds tensor constants by shape alone, and it loads a pickle without a checksum.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

# which kernels scaled_dot_product_attention may become, on a CPU too
ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


class NotStorable(Exception):
    """Says why a compiled program cannot be stored, or its key not be told."""


def torch_caches_are_off() -> str | None:
    """Why torch's user wants no compile cache; None if one may be used."""
    from torch._inductor.compiler_bisector import CompilerBisector
    from torch.compiler import config

    if CompilerBisector.bisection_enabled:
        return "torch's bisector switches passes off"
    return "torch.compiler.config.force_disable_caches" if getattr(config, "force_disable_caches", False) else None


@dataclasses.dataclass
class Wrapper:
    """What AOTAutograd made around the program, as `recorded` found it."""

    facts: bytes | None = None
    refusal: str | None = "AOTAutograd made no inference graph"

    def stored(self, inputs: Sequence[object]) -> bytes:
        """Facts and the guards of `inputs`, pickled; NotStorable where there are none. To call when all is compiled."""
        from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
        from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo

        if self.facts is None:
            raise NotStorable(str(self.refusal))
        if _guards_on_memory():
            raise NotStorable("AOTAutograd guards on inputs that share memory")
        given: list[Any] = list(inputs)
        symints: list[Any] = AOTAutogradCache._filter_backed_symints(given)
        guards = AOTAutogradCache.generate_guards_expression(AOTAutogradCacheInfo("", 0, forward_symints=symints))
        return pickle.dumps((self.facts, guards))


@contextlib.contextmanager
def recorded() -> Iterator[Wrapper]:
    """Under it, the wrappers of the next inference graph that AOTAutograd finishes are kept."""
    from torch._functorch._aot_autograd import graph_compile as stage

    found = Wrapper()
    name = "_cache_inference_info"
    original: Any = getattr(stage, name, None)
    if original is None:
        found.refusal = "this torch does not let AOTAutograd's result be stored"
        yield found
        return

    def record(config: Any, metadata: Any, subclasses: Any, compiled: Any, text: Any, wrappers: Any) -> Any:
        entry = original(config, metadata, subclasses, compiled, text, wrappers)
        facts = {
            "runtime_metadata": metadata,
            "maybe_subclass_meta": subclasses,
            "dispatch_wrappers": wrappers,
            "sanitized_aot_config": _plain(config),
        }
        try:
            with _disable_current_modes():
                found.facts = pickle.dumps(facts)
        except Exception as error:
            found.refusal = f"AOTAutograd's wrappers cannot be pickled: {error}"
        return entry

    setattr(stage, name, record)
    try:
        yield found
    finally:
        setattr(stage, name, original)


def _plain(config: Any) -> Any:
    """The part of an AOTConfig that the wrappers read when they run."""
    if hasattr(config, "to_cacheable"):
        plain = config.to_cacheable()
    else:
        stage: Any = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
        plain = stage.sanitize_aot_config(config)  # of the releases whose configs have no such method
    return dataclasses.replace(plain, aot_autograd_arg_pos_to_source=None)


def _guards_on_memory() -> bool:
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return context is not None and bool(context.guards_context.aotautograd_guards)


def guards_hold(stored: bytes, inputs: Sequence[object]) -> bool:
    """Whether the guards that compiling had added hold for the sizes of `inputs`. Adds them to this compile."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    _, guards = pickle.loads(stored)
    given: list[Any] = list(inputs)
    return not guards or bool(AOTAutogradCache.evaluate_guards(guards, AOTAutogradCache._filter_backed_symints(given)))


def wrapped(stored: bytes, run: Callable[[list[Any]], Any], inputs: Sequence[object]) -> Callable[..., Any]:
    """`run` in the wrappers that were `stored`, for Dynamo to call."""
    from torch._functorch._aot_autograd.aot_autograd_result import BundledAOTAutogradResult

    facts, _ = pickle.loads(stored)
    known = pickle.loads(facts) | {
        "compiled_fw": _Ready(run),
        "indices_of_inps_to_detach": [],
        "forward_time_taken_ns": 0,
        "backward_time_taken_ns": 0,
    }
    result = BundledAOTAutogradResult(
        **{field.name: known.get(field.name) for field in dataclasses.fields(BundledAOTAutogradResult)}
    )
    settings: Any = {}  # read where torch loads Inductor's output
    boxed = result.wrap_post_compile(list(inputs), result.sanitized_aot_config, settings)  # type: ignore[arg-type]

    def forward(*args: Any) -> Any:
        return boxed(list(args))

    return forward


@dataclasses.dataclass
class _Ready:
    """Stands where torch keeps Inductor's output: the program is loaded already."""

    run: Callable[[list[Any]], Any]

    def load(self, inputs: object) -> Callable[[list[Any]], Any]:
        return self.run

    def post_compile(self, run: Callable[[list[Any]], Any], settings: object) -> Callable[[list[Any]], Any]:
        return run


def stored_inductor_code(run: Any) -> bytes:
    """What `inductor_compile` made, for `loaded_inductor_code`. NotStorable where Inductor made something else."""
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(run, CompiledFxGraph):
        raise NotStorable(f"Inductor made a {type(run).__name__}")
    disk = copy.copy(run)
    disk.prepare_for_serialization()
    with _disable_current_modes():
        return pickle.dumps(disk)


def loaded_inductor_code(stored: bytes, settings: dict[str, object]) -> Callable[[list[Any]], Sequence[Any]]:
    """What `stored_inductor_code` stored, under the `settings` of torch._inductor.config that it was compiled with."""
    from torch._guards import tracing
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphCache, write_atomic
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    constants = CompiledFxGraphConstants()
    with tracing(None), config.patch(settings), _disable_current_modes():
        code = pickle.loads(stored)
        path = Path(code.write_to_disk())
        if path.read_text() != code.source_code:  # torch takes what lies there as it is
            write_atomic(str(path), code.source_code)
        graph, _ = FxGraphCache.cache_hit_post_compile(code, {}, constants)
        if graph is None:
            raise OSError("Inductor could not write its code")
        how: Any = {"cudagraphs": BoxedBool(False), "is_backward": False, "boxed_forward_device_index": None}
        graph.post_compile([], constants, how)
    return graph


def config_hashes() -> dict[str, str]:
    """Hashes of the configurations that reach a compiled program. Dynamo's shows in its graph."""
    import torch._functorch.config
    import torch._inductor.config

    configs: dict[str, Any] = {"functorch": torch._functorch.config, "inductor": torch._inductor.config}
    return {name: config.get_hash().hex()[:16] for name, config in configs.items()}


def modes() -> dict[str, str]:
    """Switches of the running thread and process under which AOTAutograd traces another graph."""
    autocast = [
        f"{device} {torch.get_autocast_dtype(device)}"
        for device in torch._C._autocast_supported_devices()
        if torch.is_autocast_enabled(device)
    ]
    return {
        "gradients": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "autocast": ", ".join(autocast) or "off",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "attention": ", ".join(name for name in ATTENTION if getattr(torch.backends.cuda, name)()),
    }


def size_facts(size: SymInt | SymFloat | SymBool) -> str:
    """Of each symbol of `size`, whether torch holds it for a size of a tensor, and its shape_id; without names."""
    shapes = size.node.shape_env
    marked = getattr(shapes, "_shape_id_to_unbacked_symbol", {})
    ids = {str(shapes.replace(symbol)): name for name, symbol in marked.items()}
    symbols = sorted(size.node.expr.free_symbols, key=str)
    return " ".join(f"{symbol in getattr(shapes, 'size_like', ())} {ids.get(str(symbol))}" for symbol in symbols)


def operator_facts(op: OpOverload) -> str:
    """A hash of what tracing a custom operator depends on: schema, tags, fake and Python implementations.

    NotStorable where it has parts that leave no source, for then a change would go unseen.
    """
    from torch._library.simple_registry import singleton

    name = op._schema.name
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        raise NotStorable(f"{op} decomposes into code that leaves no source")
    entry: Any = singleton.find(name)
    fake: Any = getattr(entry.fake_impl, "kernel", None)
    told = [str(op._schema), *map(str, op.tags)]
    told.append(code_hash(fake.func) if fake is not None else "no fake")
    told += [f"{key} {code_hash(kernel)}" for key, kernel in op.py_kernels.items() if callable(kernel)]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def custom_operators() -> dict[str, str]:
    """`operator_facts` of every operator in this process that has a fake implementation from outside torch.

    One whose parts leave no source has decomposed before a graph is compiled: what it is shows there.
    """
    from torch._library.simple_registry import singleton

    found, shipped = {}, str(Path(torch.__file__).parent)
    for name, entry in sorted(singleton._data.items()):
        fake = entry.fake_impl.kernel
        if fake is None or fake.source.startswith(shipped):
            continue
        path, _, overload = name.partition(".")
        namespace, _, operator = path.partition("::")
        with contextlib.suppress(NotStorable, AttributeError):
            packet = getattr(getattr(torch.ops, namespace), operator)
            found[name] = operator_facts(getattr(packet, overload or "default"))
    return found


# What its text tells in full, in code that is hashed.
PLAIN = (str, bytes, int, float, complex, type(None), type(...), torch.dtype, torch.device, torch.layout)


def code_hash(function: Any) -> str:
    """A hash of what a Python function says: its code, defaults, the functions and plain values that it reads."""
    told: list[str] = []
    _tell(function, told, {})
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def _tell(value: Any, told: list[str], seen: dict[int, Any]) -> None:
    if isinstance(value, PLAIN):
        told.append(value.hex() if isinstance(value, float) else f"{type(value).__name__} {value!r}")
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # held, so that nothing else gets its id meanwhile
    code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
    if code is not None:
        told.append(code.co_code.hex())
        parts = [*code.co_consts, *code.co_names, getattr(value, "__defaults__", None)]
        parts += sorted((getattr(value, "__kwdefaults__", None) or {}).items())
        parts += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        read = [getattr(value, "__globals__", {}).get(name) for name in code.co_names]
        parts += [part for part in read if isinstance(part, (*PLAIN, FunctionType))]
    elif isinstance(value, (tuple, list)):
        parts = list(value)
    elif isinstance(value, (set, frozenset)):
        parts = sorted(value, key=repr)
    elif isinstance(value, dict):
        parts = [part for item in value.items() for part in item]
    else:  # an object: by its type and its own functions, a custom operator's for one
        told.append(f"{type(value).__module__}.{type(value).__qualname__}")
        own = getattr(value, "__dict__", {})
        parts = [own[name] for name in sorted(own) if isinstance(own[name], FunctionType)]
    told.append(str(len(parts)))
    for part in parts:
        _tell(part, told, seen)
