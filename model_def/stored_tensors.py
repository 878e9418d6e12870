"""StoredTensor: a tensor of a safetensors file as it lies there, mapped for reading and brought in as it is touched.

    file    8 bytes, n | n bytes of JSON: name -> dtype, shape, data_offsets | the bytes of all tensors

The library's reader maps a file so that it might be written, which the system refuses where memory could not hold it
all: Engram's tables are 98 GB each. Mapped without a promise of memory for it, a file takes the memory of what is read
of it, until the tensor is gone. What is written to such a tensor stays in this process and takes memory page by page.
"""

from __future__ import annotations

import mmap
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from v41.model_def.errors import FileUnreadable
from v41.model_def.json_object import parse_object

LONGEST_HEADER = 100_000_000  # bytes, as the library has it
LARGEST_SIZE = 2**63 - 1  # of one dimension
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: torch.dtype | str  # safetensors' own name where it is none of DTYPES
    shape: tuple[int, ...]
    begin: int  # of its bytes in the file
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def mapped(self, *, at_random: bool = False) -> Tensor:
        """The tensor in the file's memory. at_random: no page is read ahead of those that are touched."""
        if not isinstance(self.dtype, torch.dtype):
            raise FileUnreadable(self.file, problem=f"a tensor of type {self.dtype} has none like it here")
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        skipped = self.begin % mmap.ALLOCATIONGRANULARITY  # where a mapping may begin
        with self.file.open("rb") as file:
            memory = private_map(file, self.begin - skipped, self.nbytes + skipped)
        if at_random and hasattr(memory, "madvise"):
            memory.madvise(mmap.MADV_RANDOM)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            stored = torch.frombuffer(memory, dtype=torch.uint8, offset=skipped)
        if self.begin % self.dtype.itemsize:  # a view needs whole elements from the start of the memory on
            stored = stored.clone()
        return stored.view(self.dtype).view(self.shape)


def private_map(file: BinaryIO, begin: int, length: int) -> mmap.mmap:
    """So many bytes of `file` in memory. Writes are this process's own; the file keeps what it has."""
    if sys.platform != "linux":
        return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=begin)
    flags, both = mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        return mmap.mmap(file.fileno(), length, flags=flags, prot=both, offset=begin)
    except OSError:  # a system that promises memory for all that may be written: then nothing may
        return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=begin)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """What the file holds, without reading a tensor. FileUnreadable where it is cut short, or says what cannot be."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(length) if 8 + length <= size and length <= LONGEST_HEADER else b""
        header = parse_object(text)
    except (OSError, ValueError) as error:
        raise FileUnreadable(file, problem=f"no safetensors header: {error}") from None
    header.pop("__metadata__", None)
    tensors = {name: entry(file, name, facts, 8 + length, size) for name, facts in header.items()}
    check_apart(file, tensors)
    return tensors


def check_apart(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """FileUnreadable where two tensors are said to share bytes."""
    placed = sorted((tensor.begin, tensor.end, name) for name, tensor in tensors.items() if tensor.nbytes)
    for (_, end, name), (begin, _, other) in pairwise(placed):
        if begin < end:
            raise FileUnreadable(file, problem=f"{name} and {other} are said to lie in the same bytes")


def entry(file: Path, name: str, facts: Any, start: int, size: int) -> StoredTensor:
    """One tensor of a header; the tensors begin at byte `start` of `size`."""
    try:
        shape, (begin, end) = tuple(facts["shape"]), facts["data_offsets"]
        dtype = DTYPES.get(facts["dtype"], str(facts["dtype"]))
        whole = all(type(n) is int and 0 <= n <= LARGEST_SIZE for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise FileUnreadable(file, problem=f"its header says {facts!r} of {name}") from None
    fits = whole and begin <= end and start + end <= size
    if fits and isinstance(dtype, torch.dtype):
        fits = end - begin == prod(shape) * dtype.itemsize
    if not fits:
        problem = f"{name}, {dtype} of shape {shape}, is said to lie in bytes {begin} to {end} of {size - start}"
        raise FileUnreadable(file, problem=problem)
    return StoredTensor(file, dtype, shape, start + begin, start + end)
