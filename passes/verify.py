"""verify: what every program must hold after every pass; a breach is an error that names pass, rule and node.

A program reads nothing before it is made, its meta is what a fresh propagation finds, its regions are well formed,
and it keeps the inputs, outputs, effects and shared memory of the program that entered. `Facts` are those of the
program before; RULES are sentences with the predicate that finds the culprit, in order: each may rely on those above.
A pass whose business is to break one (writes in place, say) lists its sentence in the pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, is_
from typing import Any

from torch import SymInt, Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from v41._compat import fake_mode_of, known_equal, memory_of, without_guards
from v41.errors import InvariantBroken
from v41.passes.analysis.effects import ASSERTS, bases, effect_of, viewed_args, written_args, written_inputs
from v41.plan import spec
from v41.regions import REDUCED, body_of, invoke_subgraph, is_region
from v41.report import source_of

Culprit = tuple[Node, str]  # the node that breaks a rule, and how


@dataclass(frozen=True)
class Facts:
    """What a pass leaves as it was."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    effects: tuple[str, ...]
    carried: tuple[str, ...]  # what each collective gives, its sizes included
    written: tuple[str, ...]
    shared: tuple[int, ...]  # for every output the first input or output that has its memory


@dataclass(frozen=True)
class Found:
    """What a node computed, and from what: all held, so that it is the same as long as each is the very same object."""

    value: Any
    operands: tuple[Any, ...]  # args and kwargs of the node, its meta, the values it read
    inside: Memory | None = None  # of a call: what the nodes of its body computed

    def still(self, operands: tuple[Any, ...]) -> bool:
        return len(operands) == len(self.operands) and all(map(is_, operands, self.operands))


Memory = dict[Node, Found]  # from one judgement of a program to the next: most passes leave most nodes alone


class Program:
    """A program under judgement. It is propagated when the first rule asks what its values are.

    memory: what an earlier judgement found. A node is run again only if it, or what it reads, is another than then.
    """

    def __init__(self, gm: GraphModule, before: Facts | None = None, memory: Memory | None = None) -> None:
        self.gm = gm
        self._before = before
        self._memory = {} if memory is None else memory

    @cached_property
    def propagated(self) -> tuple[dict[Node, Any], Culprit | None]:
        """The fresh value of every node, up to the first whose meta says something else, and that node."""
        nodes = self.gm.graph.nodes
        mode = fake_mode_of([node.meta.get("val") for node in nodes])
        with mode or contextlib.nullcontext(), without_guards(mode):
            inputs = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
            return _run(self.gm, inputs, mode, self._memory)

    @cached_property
    def now(self) -> Facts:
        fresh, wrong = self.propagated
        assert wrong is None, wrong
        return _facts(self.gm, fresh)

    @property
    def before(self) -> Facts:
        return self._before or self.now


def facts(gm: GraphModule, memory: Memory | None = None) -> Facts:
    """The Facts of a program that holds the rules."""
    return Program(gm, memory=memory).now


def verify(
    gm: GraphModule, before: Facts, *, name: str, but: Collection[str] = (), memory: Memory | None = None
) -> None:
    """InvariantBroken, naming pass `name`, unless `gm` holds every rule except those listed in `but`. memory: see
    Program."""
    program = Program(gm, before, memory)
    for rule, find in RULES:
        culprit = find(program) if rule not in but else None
        if culprit is not None:
            node, detail = culprit
            raise InvariantBroken(source_of(node), run=name, rule=rule, node=node.name, detail=detail)


def reads_too_early(program: Program) -> Culprit | None:
    return _read_before_made(program.gm)


def is_a_malformed_region(program: Program) -> Culprit | None:
    for call in program.gm.graph.nodes:
        if call.op != "call_function" or call.target is not invoke_subgraph:
            continue
        body = body_of(call)
        wanted = [node for node in body.graph.nodes if node.op == "placeholder"]
        results = body.graph.output_node().args[0]
        if len(call.args) - 2 != len(wanted):
            return call, f"hands {len(call.args) - 2} operands to a body of {len(wanted)}"
        if not isinstance(results, (tuple, list)) or len(results) != len(call.meta.get("val") or ()):
            return call, "its body does not return the tuple that its meta promises"
        allowed = ("collective",) if is_region(call, REDUCED) else ()
        effects = (inner for inner in body.graph.nodes if effect_of(inner) not in (None, *allowed))
        if is_region(call) and (effect := next(effects, None)) is not None:
            return call, f"its body has an effect, {effect.name}"
    return None


def contradicts_propagation(program: Program) -> Culprit | None:
    return program.propagated[1]


def changes_inputs(program: Program) -> Culprit | None:
    return _differs(program, program.before.inputs, program.now.inputs)


def changes_outputs(program: Program) -> Culprit | None:
    return _differs(program, program.before.outputs, program.now.outputs)


def changes_written_inputs(program: Program) -> Culprit | None:
    return _differs(program, program.before.written, program.now.written)


def changes_other_effects(program: Program) -> Culprit | None:
    before, now = ([e for e in each.effects if not e.startswith("writes")] for each in (program.before, program.now))
    return _differs(program, before, now)


def changes_effects(program: Program) -> Culprit | None:
    return _differs(program, program.before.effects, program.now.effects)


def changes_what_is_carried(program: Program) -> Culprit | None:
    return _differs(program, program.before.carried, program.now.carried)


def changes_shared_memory(program: Program) -> Culprit | None:
    return _differs(program, program.before.shared, program.now.shared)


EFFECTS = "keeps collectives, random numbers and assertions in order"
CARRIED = "keeps the sizes of what collectives carry"
WRITES = "keeps writes and their order"
SHARED = "keeps which inputs and outputs share memory"
RULES: tuple[tuple[str, Callable[[Program], Culprit | None]], ...] = (
    ("reads nothing before it is made", reads_too_early),
    ("holds well-formed regions", is_a_malformed_region),
    ("has the meta that a fresh propagation finds", contradicts_propagation),
    ("keeps its inputs", changes_inputs),
    ("keeps its outputs", changes_outputs),
    ("writes the same inputs", changes_written_inputs),
    (EFFECTS, changes_other_effects),
    (CARRIED, changes_what_is_carried),
    (WRITES, changes_effects),
    (SHARED, changes_shared_memory),
)


def _read_before_made(gm: GraphModule) -> Culprit | None:
    seen: set[Node] = set()
    for node in gm.graph.nodes:
        early = next((arg for arg in node.all_input_nodes if arg not in seen), None)
        if early is not None:
            return node, f"reads {early.name}, which is made later or elsewhere"
        seen.add(node)
        if node.op == "get_attr" and not _has(gm, str(node.target)):
            return node, f"the module has no {node.target}"
        if node.op == "call_function" and node.target is invoke_subgraph:
            inner = _read_before_made(body_of(node))
            if inner is not None:
                return node, f"in its body {inner[0].name} {inner[1]}"
    return None


def _has(gm: GraphModule, path: str) -> bool:
    owner: Any = gm
    for part in path.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def _differs(program: Program, before: Sequence[object], now: Sequence[object]) -> Culprit | None:
    if tuple(before) == tuple(now):
        return None
    at = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    old, new = (each[at] if at < len(each) else "nothing" for each in (before, now))
    return program.gm.graph.output_node(), f"number {at} was {old} and is {new}"


def _run(gm: GraphModule, inputs: Sequence[Any], mode: Any, memory: Memory) -> tuple[dict[Node, Any], Culprit | None]:
    fresh: dict[Node, Any] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "output" or node.target in ASSERTS:
            continue
        claimed, known, inside = node.meta.get("val"), memory.get(node), None
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(gm)
            operands: tuple[Any, ...] = (value, claimed)
        elif node.op == "placeholder":
            operands = (next(given), claimed)
        else:
            read = (fresh[each] for each in node.all_input_nodes)
            operands = (node.target, node.args, node.kwargs, claimed, node.meta.get("unbacked_bindings"), *read)
        if node.target is invoke_subgraph:  # its body may be another, though the call is the same
            body, inside = body_of(node), {} if known is None or known.inside is None else known.inside
            inner, wrong = _run(body, map_arg(node.args[2:], fresh.__getitem__), mode, inside)
            if wrong is not None:
                return fresh, (node, f"in its body {wrong[0].name} {wrong[1]}")
            results = map_arg(body.graph.output_node().args[0], inner.__getitem__)
            operands = (*operands, *results)  # type: ignore[misc]
        if known is not None and known.still(operands):
            fresh[node] = known.value
            continue
        if node.op == "get_attr":
            lift = mode is not None and isinstance(value, Tensor)
            fresh[node] = mode.from_tensor(value, static_shapes=True) if lift else value
        elif node.op == "placeholder":
            fresh[node] = operands[0]
        elif node.target is invoke_subgraph:
            fresh[node] = tuple(results)  # type: ignore[arg-type]
        else:
            try:
                args, kwargs = map_arg((node.args, node.kwargs), fresh.__getitem__)
                fresh[node] = node.target(*args, **kwargs)
            except Exception as error:
                return fresh, (node, f"does not run on its operands: {error}")
        if node.op == "get_attr":
            pass
        elif node.meta.get("unbacked_bindings"):
            fresh[node] = claimed  # its sizes are new symbols on every run
        elif (difference := _difference(claimed, fresh[node])) is not None:
            return fresh, (node, difference)
        memory[node] = Found(fresh[node], operands, inside)
    return fresh, None


def _difference(claimed: object, found: object) -> str | None:
    """How a node's meta and its fresh value differ; None where they do not."""
    if isinstance(found, (tuple, list)):
        if not isinstance(claimed, (tuple, list)) or len(claimed) != len(found):
            return f"its meta is {claimed}, its value a tuple of {len(found)}"
        return next((wrong for pair in zip(claimed, found, strict=True) if (wrong := _difference(*pair))), None)
    if not isinstance(found, Tensor):
        sizes = isinstance(claimed, (int, SymInt)) and isinstance(found, (int, SymInt))
        same = known_equal(claimed, found) if sizes else str(claimed) == str(found)  # type: ignore[arg-type]
        return None if same else f"its meta is {claimed}, its value {found}"
    if not isinstance(claimed, Tensor):
        return f"its meta is {claimed}, its value a tensor"
    same = claimed.dtype == found.dtype and claimed.device == found.device and claimed.ndim == found.ndim
    if same and all(map(known_equal, claimed.shape, found.shape)):
        strides = zip(found.shape, claimed.stride(), found.stride(), strict=True)
        if all(known_equal(size, 1) or known_equal(one, other) for size, one, other in strides):  # of one, any will do
            return None
    return f"its meta is {layout(claimed)}, its value {layout(found)}"


def layout(value: object) -> str:
    """What a tensor is, to the stride: "bf16[u0, 4] strides (4, 1)"; of anything else its text."""
    return f"{spec(value)} strides {tuple(value.stride())}" if isinstance(value, Tensor) else spec(value)


def _facts(gm: GraphModule, fresh: dict[Node, Any]) -> Facts:
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    results = gm.graph.output_node().args[0]
    outputs = list(results) if isinstance(results, (tuple, list)) else [results]
    values = [*(fresh[node] for node in inputs), *(fresh[n] if isinstance(n, Node) else n for n in outputs)]
    first: dict[object, int] = {}
    owners = [memory_of(value) if isinstance(value, Tensor) else ("no memory", i) for i, value in enumerate(values)]
    effects = list(_effects(gm))
    return Facts(
        inputs=tuple(f"{node.name} {layout(fresh[node])}" for node in inputs),
        outputs=tuple(layout(value) for value in values[len(inputs) :]),
        effects=tuple(effect for effect, _ in effects),
        carried=tuple(told for _, told in effects if told is not None),
        written=tuple(sorted(node.name for node in written_inputs(gm))),
        shared=tuple(first.setdefault(owner, i) for i, owner in enumerate(owners)),
    )


def _effects(gm: GraphModule) -> Iterator[tuple[str, str | None]]:
    """What `gm` does besides computing, in order, regions and other subgraphs from within; and what a collective gives,
    of which the effect tells no sizes."""
    read = _read_again(gm)
    for node in gm.graph.nodes:
        effect = effect_of(node)
        if node.op == "call_function" and node.target is invoke_subgraph:
            yield from _effects(body_of(node))
        elif effect == "writes":
            names = ", ".join(base.name for arg in written_args(node) for base in bases(arg))
            yield f"writes {names} by {node.target}{' for a later read' if node in read else ''}", None
        elif effect == "asserts":
            yield f"asserts {', '.join(str(arg.meta.get('val')) for arg in node.all_input_nodes)}", None
        elif effect is not None:
            value, told = node.meta.get("val"), f"{effect} {node.target}"
            if effect == "collective" and isinstance(value, Tensor):
                yield f"{told} {value.dtype} of {value.ndim} axes", f"{told} {spec(value)}"
            else:
                yield f"{told} {spec(value)}", None


def _read_again(gm: GraphModule) -> set[Node]:
    """The writes of memory that something reads later: no read may come to stand behind a write, or leave its place."""
    memory: dict[Node, set[Node]] = {}
    writers: dict[Node, list[Node]] = {}
    found: set[Node] = set()
    for node in gm.graph.nodes:
        written, viewed = written_args(node), viewed_args(node)
        memory[node] = set().union(*(memory[each] for each in viewed)) if viewed else {node}
        reads = written or not viewed or node.target is invoke_subgraph  # a view alone reads nothing, nor does a size
        if node.op == "call_function" and reads and not str(node.target).startswith("aten.sym_"):
            others = (arg for arg in node.all_input_nodes if arg not in written)
            found.update(writer for arg in others for base in memory[arg] for writer in writers.pop(base, ()))
        for base in (base for arg in written for base in memory[arg]):
            writers.setdefault(base, []).append(node)
    return found
