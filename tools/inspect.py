"""inspect: a whole model through capture and passes without weights: what each layer became, and why.

    capture(build) -> Inspection     `build` makes the model; its tensors and the cache have no storage
    capture_call(make)               any model: `make` returns it with the inputs of the call that is traced
    layers(inspection)               for each layer its regions, refusals, and the pieces whose work is most of all its

Dynamo, AOTAutograd, the passes and the partition run as they do in torch.compile; then it stops, before any piece is
compiled for a device and before anything runs. So 40 layers at released widths need no weights and no GPU.
"""

from __future__ import annotations

import operator
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from v41._compat import input_name, without_storage
from v41._compat_tools import failed_in_backend, not_whole, told_by_dynamo, without_a_log_of_fakes
from v41._compat_trace import young_garbage_alone
from v41.errors import GraphNotWhole, ModelFails
from v41.model_def.batch import Batch, Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.passes.changes import ORIGIN
from v41.passes.pipeline import PIPELINE
from v41.plan import Piece, Plan
from v41.regions import Region, body_of, invoke_subgraph, is_region, region_of
from v41.report import CompileReport, Decision, collect, publish
from v41.tools.nodes import module_of
from v41.tools.planning import plan_only

PHASES = ("model", "Dynamo", "AOTAutograd", *(each.name for each in PIPELINE), "partition")  # of a capture, in order
CHUNKS = (23, 40, 1)  # rows of each request in the traced step; the program is the same for any


class Captured(Exception):
    """The program is there; nothing is to run it."""


@dataclass(frozen=True)
class Inspection:
    config: V41Config | None  # None of another model
    report: CompileReport
    parameters: dict[str, str]  # input of the plan -> what the model calls it: "layers.0.attn.wkv.weight"
    seconds: dict[str, float]  # phase -> wall time, in order
    cpu_seconds: float
    peak_mib: float  # of the process so far

    @property
    def plan(self) -> Plan:
        assert self.report.plan is not None  # capture stops behind it
        return self.report.plan


@dataclass
class LayerView:
    """What the compiler found in one layer, and the pieces that belong to it."""

    layer: int | None  # None: outside of layers
    regions: list[Region] = field(default_factory=list)
    refused: list[Decision] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


def capture(build: Callable[[], V41ForCausalLM], codegen: str = "eager") -> Inspection:
    """The model that `build` makes, captured for a ragged step of a few requests."""
    return capture_call(lambda: step_of(build), codegen=codegen)


def step_of(build: Callable[[], V41ForCausalLM]) -> tuple[V41ForCausalLM, tuple[Batch, Cache]]:
    """A model and a step of it without storage."""
    with without_storage():
        model = build().eval()
        cache = Cache.zeros(model.config, len(CHUNKS), max(CHUNKS))
    chunks = [Chunk([0] * rows, 0, slot) for slot, rows in enumerate(CHUNKS)]
    return model, (build_batch(model.config, cache, chunks), cache)


def capture_call(
    make: Callable[[], tuple[nn.Module, Sequence[Any]]],
    *,
    codegen: str = "eager",
    verify: bool | str = False,
    all_reduce: str | None = None,
    told: Callable[[str], None] = lambda phase: None,
) -> Inspection:
    """A call of the model with the inputs that `make` returns with it, captured. GraphNotWhole where Dynamo cuts it,
    ModelFails where the model raises, or its operators do; both at the model's own line.

    codegen: how pieces are to run, on a device that need not be here (planning.py). verify, all_reduce: the backend's
    options of these names. told: hears which phase begins.
    """
    clock = time.perf_counter
    start, cpu = clock(), time.process_time()
    told(PHASES[0])
    model, inputs = make()
    seconds, names = {"model": clock() - start}, list[str]()

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seconds["dynamo"] = clock() - start - seconds["model"]
        names.extend(input_name(node) for node in gm.graph.nodes if node.op == "placeholder")
        told(PHASES[2])
        publish(plan_only(gm, inputs, codegen, verify, told, all_reduce))

        def stop(*_: Any) -> Any:
            raise Captured

        return stop

    told(PHASES[1])
    with torch.no_grad(), young_garbage_alone(), without_a_log_of_fakes(), collect() as reports:
        try:
            torch.compile(model, backend=backend, fullgraph=True)(*inputs)
        except Captured:
            pass
        except Exception as error:  # of the model, which may raise anything
            raise refusal(model, error) from error
    if not reports:
        raise GraphNotWhole(type(model).__name__, reason="there is no operator in it")
    (report,) = reports
    assert report.plan is not None and len(names) == len(report.plan.inputs)
    seconds |= report.seconds
    seconds["total"] = clock() - start
    parameters = dict(zip(report.plan.inputs, names, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    config = getattr(model, "config", None)
    of_ours = config if isinstance(config, V41Config) else None
    return Inspection(of_ours, report, parameters, seconds, time.process_time() - cpu, peak)


def refusal(model: nn.Module, error: Exception) -> Exception:
    """What is to be raised where capturing `model` raised `error`: what the backend raised, as it is; else what Dynamo
    made of the model's own mistake, at its line."""
    if (ours := failed_in_backend(error)) is not None:
        return ours
    reason, frame = told_by_dynamo(error)
    code = getattr(getattr(type(model), "forward", model), "__code__", None)  # a function is traced as well
    if frame is None and code is not None:
        frame = FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
    where = line_of(frame) if frame is not None else type(model).__name__
    if isinstance(error, not_whole()) and not reason.startswith("raised exception "):
        return GraphNotWhole(where, reason=reason)
    return ModelFails(where, error=reason.removeprefix("raised exception "))


def line_of(frame: FrameSummary) -> str:
    """The way in which all that is told names a line of the model."""
    return f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}  {frame.line or ''}".rstrip()


def layers(inspection: Inspection) -> list[LayerView]:
    """One view a layer, in order. A piece belongs to the layer that most of its nodes come from (layer_of), the first
    of as many; those inside its regions count each. What rests on no layer, made ready for all, counts for none; what
    lies between layers says nothing. A piece in which nothing tells belongs where the one before does, or outside of
    layers if it reads the embedding or the head. Regions and refusals stand in their own layer, or in that of what is
    in front of them in the piece."""
    config, parameters = inspection.config, inspection.parameters
    numbers = range(config.num_hidden_layers) if config else sorted({*layers_named(parameters.values())})
    views = {layer: LayerView(layer) for layer in (None, *numbers)}
    refused = {(d.body, d.node): d for run in inspection.report.passes for d in run.decisions if not d.applied}
    current, behind = None, set[str]()  # behind: values that rest on a layer
    for piece in inspection.plan.pieces:
        told = ((node, layer_of(node, parameters)) for node in piece.body.graph.nodes)
        nodes = {node: layer if layer in views else None for node, layer in told}  # a module's number may be no layer's
        votes = votes_of(nodes, behind)
        unknown = None if reads_ends(piece, parameters) else current
        current = max(votes, key=lambda each: (votes[each], each is not None), default=unknown)
        views[current].pieces.append(piece)
        last = current
        for node, layer in nodes.items():
            last = last if layer is None else layer
            view = views[last]
            if is_region(node):
                view.regions.append(region_of(node))
            judged = refused.get(node.meta.get(ORIGIN, ("", node.name)))
            if judged is not None and node.op != "placeholder":  # told where it stands, not where it is handed to
                view.refused.append(judged)
    return list(views.values())


def votes_of(nodes: Mapping[Node, int | None], behind: set[str]) -> Counter[int | None]:
    """How many of `nodes`, all of a piece with the layer of each, come from which layer, in order; None: from none, and
    rest on none. Sizes and checks of them do not count. behind: values that rest on a layer, to which those of the
    piece are added."""
    found: Counter[int | None] = Counter()
    for node, layer in nodes.items():
        if layer is not None or any(each.name in behind for each in (node, *node.all_input_nodes)):
            behind.add(node.name)
        made = isinstance(node.meta.get("val"), Tensor | tuple | list) and not of_body(node)
        if node.op == "call_function" and made and (layer is not None or node.name not in behind):
            found[layer] += sum(each.op == "call_function" for each in within(node))
    return found


def layer_of(node: Node, parameters: Mapping[str, str]) -> int | None:
    """The layer of `node`: that of the parameters that it reads itself, the last of several, else of its module; None
    where neither tells. A region is of the module of most of what it holds. If its own is none of these, it was made in
    a body that calls share, in which nodes have the modules of one of the calls, and its own counts."""
    given = layers_named(parameters.get(each.name, "") for each in node.all_input_nodes)
    if (own := max(given, default=None)) is not None:
        return own
    here = next(layers_named([f"{module_of(node) or ''}."]), None)
    held = Counter(layers_named(f"{module_of(each) or ''}." for each in within(node)))
    return max(held, key=held.__getitem__) if held and (here is None or here in held) else here


def within(node: Node) -> list[Node]:
    """The nodes of the body that `node` calls, or itself."""
    return [*body_of(node).graph.nodes] if node.target is invoke_subgraph else [node]


def of_body(node: Node) -> bool:
    """Whether `node` is a result of a body, of which its nodes are told."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.target is invoke_subgraph


def layers_named(parameters: Iterable[str]) -> Iterator[int]:
    """The layers of `parameters`: the first number in "layers.3.attn.wo_a", "model.blocks.3.up"."""
    for name in parameters:
        if found := re.match(r"(?:[A-Za-z_]\w*\.)+(\d+)\.", name):
            yield int(found[1])


def reads_ends(piece: Piece, parameters: dict[str, str]) -> bool:
    """Whether `piece` reads the embedding or the head."""
    return any(parameters.get(name, "").startswith(("embed.", "norm.", "head.")) for name in piece.reads)


def first_layers(config: V41Config, count: int) -> V41Config:
    """The model cut after `count` layers, each as it is in the whole one."""
    if count >= config.num_hidden_layers:
        return config
    tables = zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
    engram = [(layer, rows) for layer, rows in tables if layer < count]
    source = config.candidate_source_layer_id
    return config.replace(
        num_hidden_layers=count,
        compress_ratios=config.compress_ratios[:count],
        kv_source_layer_ids=tuple(layer for layer in config.kv_source_layer_ids if layer < count),
        index_source_layer_ids=tuple(layer for layer in config.index_source_layer_ids if layer < count),
        candidate_source_layer_id=source if source is not None and source < count else None,
        engram_layer_ids=tuple(layer for layer, _ in engram),
        engram_num_embeddings=tuple(rows for _, rows in engram),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )


def role(config: V41Config, layer: int) -> str:
    """What a layer does, in words."""
    it = config.roles[layer]
    words = ["window"] if it.ratio == 0 else [f"ratio {it.ratio}"]
    if it.owns_compressor:
        words.append("KV source")
    elif it.kv_source is not None:
        words.append(f"reads KV of {it.kv_source}")
    if it.owns_indexer:
        words.append("picks" if it.candidate_source is None else f"picks among candidates of {it.candidate_source}")
    elif it.index_source is not None:
        words.append(f"picks of {it.index_source}")
    words += ["makes candidates"] * it.makes_candidates + ["Engram"] * it.engram
    return ", ".join(words)
