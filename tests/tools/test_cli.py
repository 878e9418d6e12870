"""The command's exit code is its verdict, what it refuses it explains, and JSON says what the tables say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.golden_data import Golden
from v41.model_def.batch import Batch
from v41.model_def.cache import Cache
from v41.model_def.checkpoint import WEIGHTS, save_checkpoint, slots
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.cli import main
from v41.tools.inspect import first_layers

SMALL = ["generate", "--tokens", "2", "--prompt", "Rain.", "--prompt", "Wind and rain."]
COMPARE = [*SMALL, "--compare-eager", "--seeds", "2"]

Forward = Callable[[Batch, Cache], Tensor]


@pytest.fixture
def compiled_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Forward], Forward]], None]:
    """Lets a function of the model stand for the compiled one: the command itself is under test, not the compiler."""
    return lambda wrap: monkeypatch.setattr(torch, "compile", lambda model, **_: wrap(model))


def test_a_model_that_agrees_is_success(compiled_as, capsys: pytest.CaptureFixture[str]) -> None:
    compiled_as(lambda model: model)
    assert main(COMPARE) == 0
    out = capsys.readouterr().out
    assert "holds    KL <= 0.02" in out and "Rain." in out
    assert out.count("\n0 ") == 2 and "\nall " in out  # a prompt and a seed; both seeds together


def test_a_damaged_model_is_a_failure_that_names_the_row(compiled_as, capsys: pytest.CaptureFixture[str]) -> None:
    def damaged(model: Forward) -> Forward:
        return lambda batch, cache: model(batch, cache).roll(1, 0)  # each request gets another one's logits

    compiled_as(damaged)
    assert main(COMPARE) == 1
    out = capsys.readouterr().out
    assert "fails    KL <= 0.02" in out and "seed 0, request 0, position 5: KL" in out


def test_the_seeds_are_different_models(compiled_as, capsys: pytest.CaptureFixture[str]) -> None:
    compiled_as(lambda model: model)
    main([*COMPARE, "--json"])
    found = json.loads(capsys.readouterr().out)["agreement"]
    assert found["0"]["max_deviation"] != found["1"]["max_deviation"]
    assert found["0"]["rows"] == found["1"]["rows"] == found["0"]["bit_equal"] == 4


def test_json_is_all_that_stdout_has(compiled_as, capsys: pytest.CaptureFixture[str]) -> None:
    compiled_as(lambda model: model)
    assert main([*SMALL, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [len(request["continued_with"]) for request in facts["requests"]] == [2, 2]
    assert (facts["holds"], facts["agreement"], facts["graphs"]) == (True, {}, [])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [(["--preset", "huge"], "huge"), (["--codegen", "none"], "codegen"),
     (["--device", "abacus"], "abacus"), (["--device", "meta"], "meta"),
     (["--preset", ""], "''"), (["--checkpoint", ""], "no such file"),
     (["--tokens", "0"], "--tokens"), (["--temperature", "-1"], "-1"), (["--temperature", "nan"], "nan"),
     (["--preset", "tiny", "--checkpoint", "x"], "not allowed")],
)  # fmt: skip
def test_what_is_refused_is_explained(arguments: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["generate", *arguments])
    except SystemExit as exit:  # argparse leaves by itself
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and found in captured.err and not captured.out
    assert "Traceback" not in captured.err


def test_a_codegen_without_a_device_is_refused_before_there_is_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_model(*given: object, **named: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("v41.tools.generate_command.build_model", no_model)
    assert main(["generate", "--codegen", "triton", "--device", "cpu"]) == 2
    assert "codegen triton cannot run" in capsys.readouterr().err


def test_help_comes_without_torch() -> None:
    code = "import sys; from v41.tools.cli import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_checkpoint_is_read(golden: Golden, compiled_as, capsys: pytest.CaptureFixture[str]) -> None:
    compiled_as(lambda model: model)
    assert main([*COMPARE, "--tokens", "4", "--checkpoint", str(golden.folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    token_map = "ids modulo the compressed vocabulary: the folder has no tokenizer.json"
    assert facts["checkpoint"] == {"loaded": len(golden.weights), "not_used": [], "token_map": token_map}
    assert facts["layers"] == golden.config.num_hidden_layers and facts["model"] == str(golden.folder)
    first, second = facts["agreement"].values()
    assert first["median_gap"] != second["median_gap"]  # one model, other tokens


def test_tokens_are_the_likeliest_or_drawn(golden: Golden, compiled_as, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one model, the same each time: a small temperature draws the likeliest, a larger one others."""
    compiled_as(lambda model: model)

    def written(*more: str) -> list[list[int]]:
        assert main([*SMALL, "--tokens", "4", "--checkpoint", str(golden.folder), "--json", *more]) == 0
        return [request["continued_with"] for request in json.loads(capsys.readouterr().out)["requests"]]

    likeliest, drawn = written(), written("--temperature", "3")
    assert likeliest == written("--temperature", "1e-5") and drawn == written("--temperature", "3") != likeliest


def test_a_checkpoint_is_read_with_its_own_tokenizer(
    tmp_path: Path, compiled_as, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<s>", "?", "Rain", "Wind", "and", "rain", *(f"word{i}" for i in range(506))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config = first_layers(V41Config.preset("tiny").replace(engram_layer_ids=(), engram_num_embeddings=()), 1)
    model = V41ForCausalLM.random(config)
    save_checkpoint(model, tmp_path)
    save_file({**load_file(tmp_path / WEIGHTS), "mtp.0.norm.weight": torch.zeros(2)}, tmp_path / WEIGHTS)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    heard: list[int] = []
    compiled_as(lambda model: lambda batch, cache: heard.extend(batch.tokens.tolist()) or model(batch, cache))
    command = [*SMALL[:-2], "--prompt", "Wind and hail", "--checkpoint", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert heard[:6] == [0, 2, 1, 0, 3, 4] and "tokens" in out and "<s> Wind and ?" in out
    assert f"{len(slots(model))} tensors read; not used: mtp.0.norm.weight, 1 in all; Engram's token map" in out
