"""`v41 bench program`: one layer of each kind is left of a cut, weights are counted that a step reads, steps may run
again, Inductor gets a model without regions, and what fails is a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import JITFunction

from v41.model_def import attention, mhc, moe
from v41.model_def.batch import Batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.bench import program, program_cases, timing
from v41.tools.bench.contenders import INDUCTOR, MARK, NAMES, launched_so_far, without_regions
from v41.tools.bench.program import in_turn, line, memory, ratios
from v41.tools.bench.program_cases import Case, cut, eager_logits, floor_us, prepare, weight_bytes
from v41.tools.cli import main

CONFIG = cut(V41Config.preset("tiny"))
COMMAND = ["bench", "program", "--preset", "tiny", "--cut", "--device", "cpu", "--context", "12", "--prefill"]


@pytest.fixture(scope="module")
def model() -> V41ForCausalLM:
    return V41ForCausalLM.random(CONFIG, 0).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def cases(model: V41ForCausalLM) -> list[Case]:
    return prepare(model, [1, 3], [20], [40])


@pytest.mark.parametrize("preset", ["tiny", "bench", "flash"])
def test_a_cut_keeps_the_widths_and_one_layer_of_each_kind(preset: str) -> None:
    whole = V41Config.preset(preset)
    one = cut(whole)
    kinds = [(r.ratio, r.owns_compressor, r.owns_indexer, r.makes_candidates, r.candidate_source) for r in one.roles]
    assert kinds == [
        (0, False, False, False, None),
        (2, True, True, False, None),
        (1, True, True, True, None),
        (1, False, True, False, 2),
    ]
    assert [r.engram for r in one.roles] == [False, True, False, False]
    assert (one.hidden_size, one.n_routed_experts, one.vocab_size) == (
        whole.hidden_size, whole.n_routed_experts, whole.vocab_size,
    )  # fmt: skip


@torch.no_grad()
def test_a_step_that_does_not_fit_is_read_in_parts(model: V41ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("v41.tools.bench.program_cases.PART", 8)
    decode, prefill = prepare(model, [1], [20], [12])
    assert (decode.parts, [part.tokens.shape[0] for part in prefill.parts]) == ((), [8, 8, 4])
    (whole,), touched = eager_logits(model, prefill), weight_bytes(model, prefill)
    small = Cramped(model, rows=8)
    torch.testing.assert_close(eager_logits(small, prefill)[0], whole, atol=0.2, rtol=0)
    assert small.read == [20, 8, 8, 4] and weight_bytes(small, prefill) == touched
    with pytest.raises(torch.OutOfMemoryError):
        eager_logits(Cramped(model, rows=0), decode)


class Cramped(torch.nn.Module):
    """The model on a device that holds a step of so many rows."""

    def __init__(self, model: V41ForCausalLM, rows: int) -> None:
        super().__init__()
        self.model, self.rows, self.read = model, rows, list[int]()

    def forward(self, batch: Batch, cache: Cache) -> torch.Tensor:
        self.read.append(batch.tokens.shape[0])
        if self.read[-1] > self.rows:
            raise torch.OutOfMemoryError
        return self.model(batch, cache)


@torch.no_grad()
def test_a_step_may_run_again_and_its_rows_differ(model: V41ForCausalLM, cases: list[Case]) -> None:
    assert [case.name for case in cases] == ["decode 3", "decode 1", "prefill 20"]
    first = [model(case.plain, case.cache) for case in cases]
    again = [model(case.plain, case.cache) for case in cases]
    assert all(map(torch.equal, first, again))
    torch.testing.assert_close(first[0][:1], first[1], atol=0.01, rtol=0)  # the same token behind the same context
    assert not torch.allclose(first[0][0], first[0][1], atol=0.1)
    assert (cases[0].batch.positions[:3] == 38).all() and cases[0].batch.host.rows == 4, "in a bucket"


def test_every_slot_holds_the_context(cases: list[Case]) -> None:
    cache = cases[0].cache
    for records in (*cache.entries.values(), *cache.index_keys.values()):
        before = records[:, : 38 // 2]
        assert before[0].any() and torch.equal(before[0], before[2])


def test_a_long_context_is_not_all_read_and_no_two_of_its_entries_are_alike(
    model: V41ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_cases, "MOST_READ", 20)
    case, short = prepare(model, [1], [], [24, 90])
    assert (case.name, case.plain.host.chunks[0].start) == ("decode 1 of 90", 88)
    assert (short.name, short.plain.host.chunks[0].start) == ("decode 1 of 24", 22)
    assert case.cache is short.cache and case.plain.slots[0] != short.plain.slots[0]
    for source, keys in case.cache.index_keys.items():
        read, m = 20 // CONFIG.compress_ratios[source], CONFIG.compress_ratios[source]
        assert len(keys[0, : 88 // m].unique(dim=0)) == 88 // m
        scales = keys[0, :, CONFIG.index_head_dim // 2 :]
        assert torch.equal(scales[:read], scales[read : 2 * read]), "the values alone differ"
    with torch.no_grad():
        first = model(case.plain, case.cache)
        assert model(short.plain, case.cache).isfinite().all() and torch.equal(model(case.plain, case.cache), first)


def test_only_the_batch_in_buckets_is_marked(cases: list[Case]) -> None:
    def marked(tensor: torch.Tensor) -> bool:
        return hasattr(tensor, "_dynamo_unbacked_indices")

    for case in cases:
        assert marked(case.batch.tokens) and all(map(marked, case.batch.blocks.values()))
        assert not marked(case.plain.tokens) and not any(map(marked, case.plain.blocks.values()))
        assert case.plain.host.chunks == case.batch.host.chunks and case.plain.host.rows == case.rows


def test_weights_that_a_step_reads(model: V41ForCausalLM, cases: list[Case]) -> None:
    """One row reads k experts a layer, one embedding and a row of each table; more rows more, and never all twice."""

    def size(*parameters: torch.Tensor) -> int:
        return sum(p.numel() * p.element_size() for p in parameters)

    expected = size(*model.parameters()) - size(model.embed.weight[1:])
    for layer in model.layers:
        stacks = list(layer.ffn.experts.parameters())
        expected -= sum(size(stack[CONFIG.num_experts_per_tok :]) for stack in stacks)
        if layer.engram is not None:
            tables = list(layer.engram.embed.parameters())
            looked_up = (CONFIG.engram_max_ngram_size - 1) * CONFIG.engram_n_heads
            expected -= sum(size(table[looked_up:]) for table in tables)
    three, one, prefill = (weight_bytes(model, case) for case in cases)
    assert one == expected < three <= prefill < size(*model.parameters())
    assert floor_us(4_200_000) == 1.0


@torch.no_grad()
def test_inside_there_is_no_region_and_outside_there_is(model: V41ForCausalLM, cases: list[Case]) -> None:
    expected = model(cases[1].plain, cases[1].cache)

    def marks() -> list[bool]:
        return [hasattr(f, MARK) for f in (mhc.predict, moe.MoE.forward, attention.Attention.enter)]

    assert all(marks())
    with pytest.raises(ZeroDivisionError), without_regions(attention, mhc, moe):
        assert not any(marks())
        assert torch.equal(model(cases[1].plain, cases[1].cache), expected)
        raise ZeroDivisionError
    assert all(marks())


def test_what_inductor_does_best_comes_first(cases: list[Case]) -> None:
    order = [(name, case.kind) for name, case in in_turn(["compile", "reduce-overhead", "v41"], [cases[1], cases[2]])]
    assert order == [
        ("v41", "decode"), ("v41", "prefill"), ("compile", "prefill"), ("reduce-overhead", "decode"),
        ("compile", "decode"), ("reduce-overhead", "prefill"),
    ]  # fmt: skip
    assert {*INDUCTOR} < {*NAMES}


def test_ratios_and_memory() -> None:
    def record(contender: str, us: float | None, **more: Any) -> dict[str, Any]:
        measured = {"error": "it failed"} if us is None else {"us": us}
        return {"contender": contender, "case": "decode 1", "floor_us": 10.0, **measured, **more}

    records = [
        record("v41", 20.0), record("eager", 100.0), record("compile", 50.0), record("reduce-overhead", 30.0),
        record("max-autotune", None), record("v41-uncaptured", 40.0, bytes=3, reserved=5),
    ]  # fmt: skip
    assert ratios(records) == {"decode 1": {
        "over eager": 0.2, "over compile": 0.4, "over reduce-overhead": 0.667, "over v41-uncaptured": 0.5,
        "above the floor, over the best mode": 0.5,
    }}  # fmt: skip
    contenders = {"v41": {"compiles": [{"captures": {"pool_bytes": 7}}, {"captures": None}]}}
    found = memory({"records": records, "contenders": contenders})
    assert found == {"graphs": 7, "largest step uncaptured": 5, "ratio": 1.4}
    assert memory({"records": records[:3], "contenders": contenders})["ratio"] is None


def test_a_line_tells_times_where_there_are_any() -> None:
    record = {"contender": "v41", "case": "decode 1", "floor_us": 1.8}
    assert "not timed, floor 1.8" in line(record) and "None" not in line(record)
    assert "7.5 us, host 3.0 and 2.0, floor 1.8" in line({**record, "us": 7.5, "host_us": 3.0, "ahead_us": 2.0})


def test_kernels_by_origin_and_the_costliest() -> None:
    launched = [("mhc_boundary_1f", 2.0), ("triton_poi_fused_0", 1.0), ("gemm", 3.0), ("triton_poi_fused_0", 4.0)]
    assert timing.by_origin(launched, ("mhc_boundary_1f", "mhc_exit")) == {
        "generated": {"launches": 1, "us": 2.0},
        "inductor": {"launches": 2, "us": 5.0},
        "library": {"launches": 1, "us": 3.0},
    }
    assert "generated" not in timing.by_origin(launched, ())
    named = [("gate_1f0c9a", 1.0), ("gate_2f0c9b", 2.0), ("long_product", 4.0), *launched[1:]]
    assert timing.by_region(named, ("gate_", "long_product")) == [
        ("inductor", 2, 5.0), ("long_product", 1, 4.0), ("gate", 2, 3.0), ("library", 1, 3.0)
    ]  # fmt: skip
    assert timing.costliest(launched, 2) == [("triton_poi_fused_0", 2, 5.0), ("gemm", 1, 3.0)]


def a_kernel_that_ran(x: Any) -> None: ...


def a_kernel_that_did_not(x: Any) -> None: ...


def triton_poi_of_inductor(x: Any) -> None: ...


def test_kernels_of_ours_are_those_that_were_launched() -> None:
    made = [JITFunction(each) for each in (a_kernel_that_ran, a_kernel_that_did_not, triton_poi_of_inductor)]
    made[0].device_caches[0] = made[2].device_caches[0] = "compiled"
    assert launched_so_far() & {each.__name__ for each in made} == {"a_kernel_that_ran"}


@pytest.mark.parametrize("flaw", ["none", "another row's logits", "an error"])
def test_the_command_records_what_fails_and_goes_on(flaw: str, tmp_path: Path, monkeypatch) -> None:
    def compiled(model, options, backend="inductor", **_):
        def run(batch, cache):
            if flaw == "an error" and options.get("capture") == "auto":
                raise RuntimeError("no graph\ntoday")
            return model(batch, cache).roll(int(flaw == "another row's logits" and backend == "v41"), 0)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(program, "WARM", 0)
    out = tmp_path / "program.json"
    contenders = ["--contenders", "eager", "v41", "v41-uncaptured", "compile"]
    code = main([*COMMAND, "--rows", "2", *contenders, "--out", str(out)])
    found = json.loads(out.read_text())
    assert code == int(flaw != "none")
    records = {(r["contender"], r["case"]): r for r in found["records"]}
    assert len(records) == 4 and {"commit", "device", "torch", "date", "model", "context", "memory"} <= found.keys()
    assert records["eager", "decode 2"]["agreement"]["bit_equal"] == records["compile", "decode 2"]["agreement"]["rows"]
    ours = records["v41", "decode 2"]
    if flaw == "an error":
        assert ours["error"] == "RuntimeError: no graph | today"
        assert "error" not in records["v41-uncaptured", "decode 2"]
    else:
        assert (ours["agreement"]["failed"] > 0) == (flaw != "none")


def test_what_would_start_too_late_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "program.json"
    assert main([*COMMAND, "--rows", "1", "--contenders", "eager", "--budget", "0", "--out", str(out)]) == 0
    assert {record["error"] for record in json.loads(out.read_text())["records"]} == {"left out: no time"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "program"]) == 2
    assert "a benchmark measures a GPU" in capsys.readouterr().err
