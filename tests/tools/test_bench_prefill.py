"""`v41 bench prefill` keeps what it measured, and runs all but its times on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from v41 import backend
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.bench import prefill
from v41.tools.bench.prefill import CONTENDERS, DECODING, Record, cases_of, holds, line, ratios, slower, switched
from v41.tools.cli import main


def test_cases_are_prompts_in_chunks_and_one_mixed_step() -> None:
    one, two, mixed = cases_of(V41Config.preset("tiny"), [100, 40], 64)
    assert [[chunk.rows for chunk in step] for step in one.steps] == [[40]]
    assert [[chunk.rows for chunk in step] for step in two.steps] == [[64], [36]]
    assert [[chunk.rows for chunk in step] for step in mixed.steps] == [[32, 32, *[1] * (DECODING - 1)]]
    assert len({chunk.slot for chunk in mixed.steps[0]}) == DECODING + 1
    assert [chunk.following for step in (*one.steps, *two.steps) for chunk in step] == [0, 36, 0]


def test_a_switched_model_has_other_late_layers_and_comes_back() -> None:
    model = V41ForCausalLM.random(V41Config.preset("tiny"))
    with switched(model, "after_source"):
        assert [layer.attn.late for layer in model.layers] == [False] * 4 + [True] * 2
        assert model.config.swa_bounded_replay == "after_source"
        cache = Cache.zeros(model.config, 1, 40)
        assert model(build_batch(model.config, cache, [Chunk([1] * 40, 0, 0)]), cache).shape == (1, 512)
    assert not any(layer.attn.late for layer in model.layers) and model.config.swa_bounded_replay == "off"


def test_ratios_are_of_the_contender_without_trimming() -> None:
    of = {"case": "1 x 8", "kept": [1], "rows": [8]}
    records = [{"contender": "off", "us": 10.0, **of}, {"contender": "halo", "us": 5.0, **of}]
    records += [{"contender": "graphs", "error": "left out: no time", "case": "1 x 8"}]
    assert ratios(records) == {"1 x 8": {"off": 1.0, "halo": 0.5}}
    assert line(records[1]) == "halo  1 x 8: 5.0 us  kept 1 of 8 rows" and "no time" in line(records[2])


def test_kept_rows_that_cost_time_are_named() -> None:
    """The halo of a short prompt is all of it, and nothing captured is no fair match: both may be slower."""
    quick = {"off": 1.0, "graphs": 0.6, "replay": 1.2, "halo": 1.01}
    assert slower({"1 x 8": quick, "1 x 4": {**quick, "graphs": 1.001}, "1 x 2": {"off": 1.0}}) == ["1 x 4"]


@pytest.mark.parametrize(
    ("facts", "fine"),
    [({"kl": 0.0}, True), ({"kl": 0.02}, True), ({"kl": 0.03}, False), ({"kl": float("nan")}, False),
     ({"error": "left out: no time"}, False), ({"kl": "eager does not fit into memory"}, True)],
)  # fmt: skip
def test_a_record_holds_where_it_ran_and_is_eagers_where_that_has_one(facts: Record, fine: bool) -> None:
    assert holds(facts) is fine


def test_eager_that_does_not_fit_leaves_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prefill, "run", run)
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("its programs are measured yet"))
    model = V41ForCausalLM.random(V41Config.preset("tiny"))
    (case, _), known = cases_of(model.config, [8], 64), dict[tuple[str, str], torch.Tensor | str]()
    cache = Cache.zeros(model.config, 1, 40)
    assert prefill.eager(model, case, cache, known, "off") == "eager does not fit into memory"
    assert prefill.eager(model, case, cache, known, "off") == known["off", case.name]


@pytest.mark.slow
def test_all_but_the_times_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    arguments = ["--preset", "tiny", "--tokens", "100", "--chunk", "128", "--codegen", "eager", "--device", "cpu"]
    arguments += ["--budget", "3000"]  # of seconds, on a busy machine
    assert main(["bench", "prefill", *arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    records = result["records"]
    assert {(r["contender"], r["case"].split()[0]) for r in records} == {(n, case) for n in CONTENDERS for case in "12"}
    assert all(record["kl"] == 0 for record in records)
    kept = {record["contender"]: record["kept"] for record in records if record["case"] == "1 x 100"}
    assert kept["replay"] == kept["graphs"] <= kept["halo"] == kept["off"]
    assert {name: [each["trimmed"] for each in found] for name, found in result["contenders"].items()} == {
        "off": [0], "graphs": [1], "replay": [1], "halo": [2],  # its inner rows are a seam, too
    }  # fmt: skip


def test_programs_of_a_block_share_what_equal_pieces_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[object]()
    eager = backend.eager_artifact
    monkeypatch.setattr(backend, "eager_artifact", lambda body: made.append(body) or eager(body))

    def compile_and_run(factor: float) -> None:
        torch.compiler.reset()
        compiled = torch.compile(
            lambda x: x.sin() * factor, backend="v41", options={"codegen": "eager", "cache": False}
        )
        with torch.no_grad():
            assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin() * factor)

    with backend.shared_artifacts():
        for factor in (2.0, 2.0, 3.0):
            compile_and_run(factor)
        assert len(made) == 2
    compile_and_run(2.0)
    assert len(made) == 3
