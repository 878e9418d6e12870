"""Stored tensors are what the library wrote, damaged files are named, and memory follows what is read of them."""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.checkpoint import INDEX, WEIGHTS, slots
from v41.model_def.config import V41Config
from v41.model_def.errors import FileUnreadable
from v41.model_def.model import V41ForCausalLM
from v41.model_def.stored_tensors import DTYPES, LONGEST_HEADER, read_header

TINY = V41Config.preset("tiny")
STATUS = Path("/proc/self/status")
measures = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
                min_size=1, max_size=5))  # fmt: skip
def test_reads_what_the_library_wrote(tmp_path_factory: pytest.TempPathFactory, kinds: list[Any]) -> None:
    file, tensors = tmp_path_factory.mktemp("stored") / "some.safetensors", {}
    for i, (name, shape) in enumerate(kinds):
        dtype = DTYPES[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors[str(i)] = torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)
    save_file(tensors, file, metadata={"format": "pt"})
    stored = read_header(file)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for mapped in stored[name].mapped(), stored[name].mapped(at_random=True):
            assert (mapped.dtype, mapped.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(as_bytes(mapped), as_bytes(tensor))


def write(file: Path, header: object, tensors: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + tensors)
    return file


def test_a_tensor_may_begin_anywhere_in_the_file(tmp_path: Path) -> None:
    facts = {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}
    header = json.dumps({"x": facts}).encode()
    file = write(tmp_path / "odd", header + b" " * (-len(header) % 8), b"\0" + struct.pack("<2f", 1.5, -2.0))
    assert read_header(file)["x"].mapped().tolist() == [1.5, -2.0]


FITS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED: dict[str, tuple[object, bytes, int | None]] = {
    "nothing": (b"", b"", None),
    "cut in the header": (b'{"x":', b"", 100),
    "a header longer than the file": ({}, b"", 2**62),
    "no text": (b"\xff\xfe", b"", None),
    "no object": ([1], b"", None),
    "no facts": ({"x": 1}, bytes(8), None),
    "no shape": ({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), None),
    "cut in the tensors": ({"x": FITS}, bytes(7), None),
    "bytes of another shape": ({"x": FITS | {"shape": [3]}}, bytes(8), None),
    "ends before it begins": ({"x": FITS | {"shape": [0], "data_offsets": [8, 0]}}, bytes(8), None),
    "begins before the file": ({"x": FITS | {"data_offsets": [-8, 0]}}, bytes(8), None),
    "a fraction of a row": ({"x": FITS | {"shape": [2.0]}}, bytes(8), None),
    "more than 64 bits": ({"x": FITS | {"shape": [0, 2**63], "data_offsets": [0, 0]}}, b"", None),
    "bytes of another": ({"x": FITS, "y": FITS | {"data_offsets": [4, 12]}}, bytes(12), None),
    "bytes of another, further on": (
        {"x": FITS, "z": FITS | {"data_offsets": [20, 28]}, "y": FITS | {"data_offsets": [16, 24]}}, bytes(28), None),
    "the same bytes": ({"x": FITS, "y": FITS}, bytes(8), None),
    "a name twice": (b'{"x": %b, "x": %b}' % (json.dumps(FITS).encode(), json.dumps(FITS).encode()), bytes(8), None),
    "a fact twice": (b'{"x": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}', bytes(8), None),
    "nested too deep": (b"[" * 100_000, b"", None),
    "nested too deep within": (b'{"x": ' * 100_000, b"", None),
    "a number of 5000 digits": (b'{"x": 1%b}' % (b"0" * 5000), b"", None),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    file = write(tmp_path / "damaged", *DAMAGED[damage])
    with pytest.raises(FileUnreadable) as caught:
        read_header(file)
    assert caught.value.where == file
    assert read_header(write(tmp_path / "whole", {"x": FITS}, bytes(8))).keys() == {"x"}


def test_tensors_may_lie_in_any_order_and_empty_ones_anywhere(tmp_path: Path) -> None:
    empty = FITS | {"shape": [0]}
    header = {"b": FITS | {"data_offsets": [8, 16]}, "a": FITS, "0": empty | {"data_offsets": [4, 4]}}
    assert read_header(write(tmp_path / "whole", header, bytes(16))).keys() == header.keys()


def test_a_header_longer_than_any_is_not_read(tmp_path: Path) -> None:
    file = write(tmp_path / "long", {}, length=LONGEST_HEADER + 1)
    os.truncate(file, LONGEST_HEADER + 100)
    with pytest.raises(FileUnreadable, match="no safetensors header"):
        read_header(file)


def filled_file(file: Path, size: int) -> Path:
    """One tensor of bytes, all zero: a hole that takes no room on the disk."""
    write(file, {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    try:
        os.truncate(file, file.stat().st_size + size)
    except OSError as error:
        pytest.skip(f"no file of {size} bytes here: {error}")
    return file


@measures
def test_what_is_written_to_a_mapped_tensor_stays_in_the_process(tmp_path: Path) -> None:
    """120 GiB, more than the system would promise memory for; only the pages that are written take some."""
    file = filled_file(tmp_path / "large", 120 << 30)
    before, tensor = resident("VmRSS"), read_header(file)["x"].mapped(at_random=True)
    tensor[[5, 100 << 30, -1]] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    assert tensor[[5, 100 << 30, -1, 6]].tolist() == [7, 8, 9, 0]
    assert read_header(file)["x"].mapped(at_random=True)[[5, 100 << 30, -1]].tolist() == [0, 0, 0]
    assert file.stat().st_blocks * 512 < 2**20 and resident("VmRSS") - before < 2**26


def test_where_memory_must_be_promised_it_is_mapped_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, library = filled_file(tmp_path / "some", 16), mmap.mmap

    def promises(descriptor: int, length: int, **how: Any) -> mmap.mmap:
        if how.get("access") != mmap.ACCESS_READ:
            raise OSError("Cannot allocate memory")
        return library(descriptor, length, **how)

    monkeypatch.setattr(mmap, "mmap", promises)
    assert read_header(file)["x"].mapped().tolist() == [0] * 16


def test_a_type_without_a_likeness_is_refused_where_it_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "strange", {"x": {"dtype": "F6", "shape": [4], "data_offsets": [0, 3]}}, bytes(3))
    with pytest.raises(FileUnreadable, match="F6"):
        read_header(file)["x"].mapped()


def resident(kind: str) -> int:
    """Bytes that this process holds now (VmRSS) or has held at most (VmHWM)."""
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(kind))


def forget_the_peak() -> int:
    """From here on VmHWM is what is held from here on; returns what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


@measures
def test_loading_takes_the_model_and_one_shard(tmp_path: Path) -> None:
    """Shards of 102 MB: with all of them mapped until the end it would be twice the model."""
    config = TINY.replace(num_hidden_layers=1, engram_layer_ids=(), engram_num_embeddings=(), compress_ratios=(0,),
                          kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=None,
                          vocab_size=50_000, hidden_size=1024)  # fmt: skip
    with torch.device("meta"):
        model = V41ForCausalLM(config)
    weight_map = {name: name if name in ("embed.weight", "head.weight") else "others" for name in slots(model)}
    for shard in {*weight_map.values()}:
        names = [name for name in weight_map if weight_map[name] == shard]
        save_file(
            {name: torch.zeros_like(slots(model)[name].parameter, device="cpu") for name in names}, tmp_path / shard
        )
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    heard: list[tuple[int, int]] = []
    before = forget_the_peak()
    model = V41ForCausalLM.from_checkpoint(tmp_path, progress=lambda done, whole: heard.append((done, whole)))
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > 200e6
    assert resident("VmHWM") - before < size + model.embed.weight.nbytes + 30e6
    assert len(heard) == len(slots(model)) and heard == sorted(heard) and heard[-1] == (size, size)


def released_tables() -> V41Config:
    """A tiny model with the two Engram tables of the release: 188 GiB."""
    flash = V41Config.preset("flash")
    names = ("num_embeddings", "vocab_size", "max_ngram_size", "n_heads", "head_dim")
    return TINY.replace(**{f"engram_{name}": getattr(flash, f"engram_{name}") for name in names})


@measures
def test_tables_of_188_GiB_are_read_without_memory_for_them(tmp_path: Path, record_property: Any) -> None:
    """The file is sparse: it holds nothing but the rows that a prompt looks up."""
    config = released_tables()
    with torch.device("meta"):
        targets = slots(V41ForCausalLM(config))
    header: dict[str, dict[str, Any]] = {}
    end, kinds = 0, {dtype: name for name, dtype in DTYPES.items()}
    for name, slot in targets.items():
        begin, end = end, end + slot.parameter.nbytes
        facts = {"dtype": kinds[slot.dtypes[0]], "shape": list(slot.parameter.shape)}
        header[name] = facts | {"data_offsets": [begin, end]}
    file = write(tmp_path / WEIGHTS, header)
    start = file.stat().st_size
    try:
        os.truncate(file, start + end)
    except OSError as error:
        pytest.skip(f"no file of 188 GiB here: {error}")
    assert file.stat().st_size > 188 * 2**30 and file.stat().st_blocks * 512 < 2**20
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))

    before = forget_the_peak()
    model, ids = V41ForCausalLM.from_checkpoint(tmp_path), [7 * n * n % config.vocab_size for n in range(200)]
    cache = Cache.zeros(config, 1, len(ids))
    batch = build_batch(config, cache, [Chunk(ids, 0, 0)])
    with file.open("r+b") as opened:
        for i in config.engram_layer_ids:
            for row in model.layers[i].engram.rows(batch.lookback).flatten().tolist():
                opened.seek(start + header[f"layers.{i}.engram.embed.weight"]["data_offsets"][0] + row * 256)
                opened.write(torch.full((256,), row % 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes())
                opened.seek(start + header[f"layers.{i}.engram.embed.scale"]["data_offsets"][0] + row * 8)
                opened.write(bytes([127 + i] * 8))
    with torch.no_grad():
        for i in config.engram_layer_ids:
            engram = model.layers[i].engram
            rows = engram.rows(batch.lookback)  # [T, 24]
            values = (rows % 448).to(torch.float8_e4m3fn).float() * 2**i
            assert torch.equal(engram.embed(rows), values.bfloat16().unsqueeze(-1).expand(*rows.shape, 256))
        assert torch.isfinite(model(batch, cache)).all()
    grown = resident("VmHWM") - before
    record_property("resident MiB beside 188 GiB of tables", grown >> 20)
    assert grown < 2**30
