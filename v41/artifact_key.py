"""key_of: what a stored program depends on, as named parts; two processes with equal parts compile the same.

    key = key_of(gm, options={...}, device=device)
    key.digest          the name of the entry
    key.parts           {"program": {"wiring": ..., "numbers": ..., "inputs": ..., "lines": ...}, "sources": {...}, ...}

In the key, each a line that the report can name when it differs:
  program      Dynamo's graph with the bodies it calls: operators and wiring; every number in it, floats bit by bit; of
               every input its name, dtype, device, shape, strides, symbols with their ranges and shape_id, and which
               inputs share memory; and the model's lines, since the report shows them
  operators    custom operators that the graph calls: schema, tags, fake implementation, by what their code says
  sources      every file of the backend, the passes, lowering and runtime, by content as it was when v41 was imported
  passes       the list that runs, in order, by what the code of each says: it may have been edited in the process
  options      what torch.compile(options=...) asked for, save what only the run obeys (capture, buckets, tune)
  device       type, name, capability
  versions     torch, triton, Python
  torch        configuration of AOTAutograd and Inductor, and the modes of the thread (autocast, determinism, ...)
  environment  whether Triton interprets, which C++ compiler there is

Not in it: values and addresses of inputs, names of nodes. A graph that a key cannot tell apart from another (it holds
tensors, or calls functions of the user) raises NotStorable and is compiled each time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import GraphModule, Node

from v41._compat import HigherOrderOperator, OpOverload, OpOverloadPacket, input_name, memory_of
from v41._compat_cache import NotStorable, code_hash, config_hashes, modes, operator_facts, size_facts
from v41._compat_groups import backend_of, ranks_of
from v41.passes.structure import Symbols
from v41.regions import invoke_subgraph
from v41.report import source_of

Parts = dict[str, dict[str, str]]

ROOT = Path(__file__).resolve().parent
COMPILER = ("", "passes", "lowering", "runtime")  # folders of v41 whose sources decide what is compiled
SHIPPED = frozenset({"aten", "prims", "prim", "inductor", "quantized", "_c10d_functional", "c10d", "symm_mem"})
OF_TORCH = ("torch", "operator", "_operator", "math", "builtins")  # their functions change with the versions alone


@dataclass(frozen=True)
class Key:
    parts: Parts

    @cached_property
    def digest(self) -> str:
        return short(f"{group} {name} {told}" for group, name, told in _flat(self.parts))

    def differences(self, other: Parts) -> list[str]:
        """What differs from another key: "sources: passes/canonicalize.py"."""
        ours = {(group, name): told for group, name, told in _flat(self.parts)}
        theirs = {(group, name): told for group, name, told in _flat(other)}
        found: dict[str, list[str]] = {}
        for group, name in sorted(ours.keys() | theirs.keys()):
            if ours.get((group, name)) != theirs.get((group, name)):
                found.setdefault(group, []).append(name)
        return [f"{group}: {', '.join(names)}" for group, names in found.items()]


def _flat(parts: Parts) -> list[tuple[str, str, str]]:
    return [(group, name, told) for group, names in sorted(parts.items()) for name, told in sorted(names.items())]


def short(lines: Iterable[str]) -> str:
    """32 hexadecimal digits for these lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def key_of(
    gm: GraphModule,
    *,
    options: Mapping[str, object],
    passes: Iterable[tuple[str, Callable[..., Any]]],
    device: torch.device,
) -> Key:
    """The key of Dynamo's graph `gm` compiled with `options` for `device`. NotStorable says why none.

    `passes`: name and function of each, in order.
    """
    told = _Graph()
    told.read(gm)
    return Key({
        "program": told.parts(),
        "operators": {str(op): operator_facts(op) for op in told.custom},
        "sources": dict(SOURCES),
        "passes": {f"{i} {name}": code_hash(run) for i, (name, run) in enumerate(passes)},
        "options": {name: repr(value) for name, value in options.items()},
        "device": device_facts(device),
        "versions": {"torch": str(torch.__version__), "triton": triton_version(), "python": sys.version.split()[0]},
        "torch": config_hashes() | modes(),
        "environment": environment(),
    })  # fmt: skip


def sources(root: Path = ROOT) -> dict[str, str]:
    """Every source file of the compiler under `root`, relative to it, with a hash of its content."""
    found = {}
    for folder in COMPILER:
        for where, folders, files in os.walk(root / folder, followlinks=True):
            folders[:] = sorted(folders) if folder else []  # of v41 itself its own files
            for path in sorted(Path(where) / name for name in files if name.endswith(".py")):
                found[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


SOURCES = sources()  # read with the code itself: what is on disk later is not what runs


def device_facts(device: torch.device) -> dict[str, str]:
    if device.type != "cuda" or not torch.cuda.is_available():
        return {"type": device.type, "name": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return {"type": f"{device.type} {torch.version.cuda}", "name": name, "capability": f"{major}.{minor}"}


def environment() -> dict[str, str]:
    """Whether Triton interprets, and which C++ compiler Inductor would find: without one its pieces run as eager."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    return {"TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", ""), "C++ compiler": str(compiler)}


def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _groups(node: Node) -> list[str]:
    """Names of process groups among its arguments. A name says nothing of how many ranks there are."""
    return [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, str) and ranks_of(each)]


@dataclass
class _Graph:
    """Collects what a graph says, wiring apart from numbers so that a report can name which differs."""

    symbols: Symbols = field(default_factory=Symbols)
    wiring: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    custom: dict[OpOverload, None] = field(default_factory=dict)
    memories: dict[object, int] = field(default_factory=dict)

    def parts(self) -> dict[str, str]:
        return {name: short(getattr(self, name)) for name in ("wiring", "numbers", "inputs", "lines")}

    def read(self, gm: GraphModule) -> None:
        number: dict[Node, str] = {}
        for node in gm.graph.nodes:
            number[node] = f"%{len(number)}"
            if node.op == "placeholder":
                self.inputs.append(self.input(node))
            elif node.op == "get_attr":
                self.body(gm, node)
            elif node.op == "call_module":
                raise NotStorable(f"the graph calls the module {node.target}, which may hold tensors")
            else:
                args, kwargs = node.args, dict(sorted(node.kwargs.items()))
                if node.target is invoke_subgraph:
                    args = (args[0], None, *args[2:])  # the identifier is a name
                target = node.target if node.op in ("call_method", "output") else self.target(node.target)
                spelled = "".join(self.spell((args, kwargs), number))
                spelled += "".join(f" group of {ranks_of(each)}, {backend_of(each)}" for each in _groups(node))
                self.wiring.append(f"{number[node]} {node.op} {target} {spelled}")
            self.lines.append(source_of(node))

    def body(self, gm: GraphModule, node: Node) -> None:
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(gm.get_submodule(owner), name)
        if not isinstance(value, GraphModule):
            raise NotStorable(f"the graph holds {node.target}, a {type(value).__name__}")
        if any(value.meta.values()):
            raise NotStorable(f"the body {node.target} was given settings: {', '.join(map(str, value.meta))}")
        self.wiring.append("body")
        self.read(value)
        self.wiring.append("end of body")

    def input(self, node: Node) -> str:
        value = node.meta.get("example_value", node.meta.get("val"))
        name = input_name(node)  # sizes are called by it where torch does not hand over a shape_id
        if isinstance(value, (SymInt, SymFloat, SymBool)):
            return f"{name} {self.symbols.spec(value)} {size_facts(value)}"
        if not isinstance(value, Tensor):
            raise NotStorable(f"input {node.name} is a {type(value).__name__}")
        sizes = [size for size in (*value.shape, *value.stride()) if isinstance(size, SymInt)]
        memory = self.memories.setdefault(memory_of(value), len(self.memories))
        facts = [value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), memory, *map(size_facts, sizes)]
        return f"{name} {type(value).__name__} {self.symbols.spec(value)} {facts}"

    def target(self, target: Any) -> str:
        if isinstance(target, OpOverloadPacket):
            return ",".join(self.target(getattr(target, name)) for name in sorted(target.overloads()))
        if isinstance(target, OpOverload):
            if target.namespace not in SHIPPED:
                self.custom[target] = None
            return str(target)
        if isinstance(target, HigherOrderOperator):
            if target is not invoke_subgraph:
                raise NotStorable(f"the graph calls the higher-order operator {target}")
            return str(target)
        owner = getattr(target, "__objclass__", None) or target
        module = str(getattr(owner, "__module__", None) or getattr(type(target), "__module__", None))
        name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
        if name is None or "<" in name or module.split(".")[0] not in OF_TORCH:
            raise NotStorable(f"the graph calls {target}, a function of the user")
        return f"{module}.{name}"

    def spell(self, value: Any, number: dict[Node, str]) -> Iterator[str]:
        match value:
            case Node():
                yield number[value] + " "
            case tuple() | list():
                yield "("
                for item in value:
                    yield from self.spell(item, number)
                yield ")"
            case dict():
                for name, item in value.items():
                    yield f"{name}="
                    yield from self.spell(item, number)
            case slice():
                yield "slice"
                yield from self.spell((value.start, value.stop, value.step), number)
            case SymInt() | SymFloat() | SymBool():
                yield self.symbols.spell(value) + " "
            case bool() | int() | float() | complex():
                self.numbers.append(f"{type(value).__name__} {value.hex() if isinstance(value, float) else value}")
                yield "# "
            case None | str() | types.EllipsisType() | torch.dtype() | torch.device() | torch.layout():
                yield f"{value!r} "
            case torch.memory_format():
                yield f"{value!r} "
            case _ if isinstance(value, type) and value.__module__.split(".")[0] in OF_TORCH:
                yield f"{value.__module__}.{value.__qualname__} "
            case _:
                raise NotStorable(f"the graph holds a {type(value).__name__}")
