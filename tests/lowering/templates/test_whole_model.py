"""The whole tiny model with its indexers and attention as generated kernels, by the interpreter, speaks as in eager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.lowering.rowwise import running
from tests.lowering.templates.launched import interpret
from tests.triton_interpreter import Interpreter
from v41 import backend
from v41.lowering.templates.attention import AttentionKernel
from v41.lowering.templates.index_scores import IndexKernel
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.report import CompileReport, collect

KINDS = ("attention", "index_scores")
LENGTHS = (23, 40, 1)  # rows of each request in its prompt; then each decodes two


def steps_of(config: V41Config) -> list[list[Chunk]]:
    prompt = [Chunk([(7 * i + slot) % config.vocab_size for i in range(n)], 0, slot) for slot, n in enumerate(LENGTHS)]
    later = [[Chunk([*chunk.ids, *range(more)], len(chunk.ids) + more - 1, chunk.slot) for chunk in prompt]
             for more in (1, 2)]  # fmt: skip
    return [prompt, *later]


def run(forward: Any, config: V41Config, cache: Cache | None = None) -> list[Tensor]:
    """Logits of each step, one cache throughout."""
    cache = cache or Cache.zeros(config, len(LENGTHS), 64)
    return [forward(build_batch(config, cache, chunks), cache).float() for chunks in steps_of(config)]


@pytest.fixture
def launched(interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The backend compiles for a GPU; kernels of KINDS run by the interpreter and are counted, all else as eager."""
    plain, found = backend.generated, Counter[str]()

    def generated(body: GraphModule, names: Sequence[str], report: CompileReport) -> Any:
        return plain(body, names, report) if set(backend.kinds_cut_out(body)) & set(KINDS) else ""

    def index_scores(self: IndexKernel, *tensors: Any) -> tuple[Tensor, ...]:
        steps, outputs = self.steps(tensors)
        interpret(interpreter, self, steps)
        found[" ".join(("index_scores", self.form.given, *self.form.outputs))] += 1
        return outputs

    def attention(self: AttentionKernel, *tensors: Any) -> tuple[Tensor, ...]:
        found["attention"] += 1
        return tuple(running.interpret(interpreter, self, tensors))

    monkeypatch.setattr(backend, "effective_codegen", lambda *_: ("triton", "a test"))
    monkeypatch.setattr(backend, "ways", lambda *_: ("triton", "eager"))
    monkeypatch.setattr(backend, "generated", generated)
    monkeypatch.setattr(IndexKernel, "launch", index_scores)
    monkeypatch.setattr(AttentionKernel, "launch", attention)
    return found


@pytest.mark.slow
def test_as_planned_for_a_gpu_the_whole_tiny_model_has_the_bits_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece as its ATen nodes: logits, and what is left in the cache. Attention reads records where they lie, save
    those of the window in the layer that the inner seam cuts in two."""
    monkeypatch.setattr(backend, "effective_codegen", lambda *_: ("triton", "a test"))
    monkeypatch.setattr(backend, "ways", lambda *_: ("triton", "eager"))
    monkeypatch.setattr(backend, "generated", lambda *_: "")
    config = V41Config.preset("tiny")
    model = V41ForCausalLM.random(config, 0, "cpu")
    compiled = torch.compile(model, backend="v41", fullgraph=True, options={"cache": False, "verify": True})
    torch._dynamo.reset()
    caches = [Cache.zeros(config, len(LENGTHS), 64) for _ in range(2)]
    with torch.no_grad(), collect() as reports:
        ours, eager = run(compiled, config, caches[0]), run(model, config, caches[1])
    (report,) = reports
    passes = {run.name: run for run in report.passes}
    assert [each.failure for each in report.passes if each.failure] == []
    gathers, writes = passes["take_in_gathers"], passes["reinplace_cache_writes"]
    branches = sum(1 + bool(role.ratio) for role in config.roles)
    assert (gathers.applied, gathers.refused) == (branches - 1, 1)
    assert {each.rule for each in gathers.decisions if not each.applied} == {
        "records of this step are those of its rows"
    }
    assert writes.refused == 0
    assert all(map(torch.equal, ours, eager))
    kept = [[*c.rings, *c.entries.values(), *c.index_keys.values(), *c.tails.values()] for c in caches]
    assert all(torch.equal(a[:-1], b[:-1]) for a, b in zip(*kept, strict=True))


@pytest.mark.slow
def test_kernels_in_the_whole_tiny_model_speak_as_eager(launched: Counter[str]) -> None:
    config = V41Config.preset("tiny")
    model = V41ForCausalLM.random(config, 0, "cpu")
    compiled = torch.compile(model, backend="v41", fullgraph=True, options={"cache": False})
    torch._dynamo.reset()
    with torch.no_grad(), collect() as reports:
        ours, eager = run(compiled, config), run(model, config)
    (report,) = reports
    assert report.fallbacks == [] and [run.failure for run in report.passes if run.failure] == []
    restricted = next(run for run in report.passes if run.name == "restrict_index_scores")
    assert (restricted.applied, restricted.refused) == (1, 0)
    steps = len(eager)
    assert launched == {
        "attention": config.num_hidden_layers * steps,
        "index_scores  picks": steps,
        "index_scores  picks kept_blocks": steps,
        "index_scores candidate_blocks picks": steps,
    }
    for found, wanted in zip(ours, eager, strict=True):
        kl = torch.nn.functional.kl_div(
            found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none"
        )
        assert kl.sum(-1).max() < 0.02
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))
