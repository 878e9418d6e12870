"""engram_tables: tables move and nothing changes; bench tables compares the bits of all, and counts pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from v41.errors import TableNotHeld
from v41.model_def.config import V41Config
from v41.model_def.engram import Engram, EngramTable
from v41.model_def.model import V41ForCausalLM
from v41.tools.bench import tables
from v41.tools.cli import TABLES, main
from v41.tools.engram_tables import PLACES, place_tables
from v41.tools.inspect import first_layers

TINY = first_layers(V41Config.preset("tiny"), 2)


def model() -> V41ForCausalLM:
    return V41ForCausalLM.random(TINY, 0).eval().requires_grad_(False)


def engrams(of: V41ForCausalLM) -> list[Engram]:
    return [module for module in of.modules() if isinstance(module, Engram)]


def test_resident_tables_give_the_same_rows() -> None:
    plain, moved = model(), model()
    held = place_tables(moved, "resident", "cpu")
    sizes = [p.nbytes for engram in engrams(moved) for p in engram.embed.parameters()]
    assert held == sum(sizes) > 0 and {*TABLES} == {*PLACES}
    lookback = torch.tensor([[5, 6, 7, 8], [-1, 5, 6, 7], [9, -1, 5, 6]])
    streams = torch.randn(3, TINY.hc_mult, TINY.hidden_size).bfloat16()
    for ours, theirs in zip(engrams(moved), engrams(plain), strict=True):
        assert torch.equal(ours(streams, lookback), theirs(streams, lookback))
        assert not any(p.requires_grad for p in ours.embed.parameters())
    assert moved.state_dict().keys() == plain.state_dict().keys()


def test_mapped_tables_stay_where_they_are() -> None:
    plain = model()
    before = [p.data_ptr() for engram in engrams(plain) for p in engram.embed.parameters()]
    assert place_tables(plain, "mapped", "cpu") == 0
    assert [p.data_ptr() for engram in engrams(plain) for p in engram.embed.parameters()] == before


def test_a_cpu_pins_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TableNotHeld, match="cpu is no GPU"):
        place_tables(model(), "pinned", "cpu")
    assert main(["generate", "--device", "cpu", "--tables", "pinned"]) == 2
    assert "cpu is no GPU here" in capsys.readouterr().err


def test_the_bench_compares_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tables.json"
    arguments = ["bench", "tables", "--device", "cpu", "--rows", "1", "3", "--table-rows", "2000", "--out", str(out)]
    assert main(arguments) == 0
    made = json.loads(out.read_text())
    names = ["mapped, cold", "mapped", "huge file", "small", "resident"]
    assert [(r["table"], r["tokens"]) for r in made["records"]] == [(name, n) for name in names for n in (1, 3)]
    assert all(r["same_bits"] and r["gather_us"] > 0 for r in made["records"])
    faults = {r["table"]: r["faults"] for r in made["records"] if r["tokens"] == 3}
    assert faults["mapped"] > faults["resident"] and "holds: the same bits" in capsys.readouterr().out


def test_the_bench_sees_another_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tables.host_tables.in_memory

    def spoiled(table: Any) -> Any:
        made = library(table)
        made.view(torch.uint8)[:] ^= 1
        return made

    monkeypatch.setattr(tables.host_tables, "in_memory", spoiled)
    few = ["--rows", "2", "--table-rows", "500", "--out", str(tmp_path / "tables.json")]
    assert main(["bench", "tables", "--device", "cpu", *few]) == 1
    assert EngramTable(3, 32).weight.shape == (3, 32)
