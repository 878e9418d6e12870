"""StoredTensor: a tensor of a safetensors file as it lies there, mapped for reading and brought in as it is touched.

    file    8 bytes, n | n bytes of JSON: name -> dtype, shape, data_offsets | the bytes of all tensors

The library's reader maps a file so that it might be written, which the system refuses where memory could not hold it
all: Engram's tables are 98 GB each. Mapped for reading alone, a file takes the memory of what is read of it, until the
tensor is gone. Such a tensor must not be written.
"""

from __future__ import annotations

import json
import mmap
import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41.model_def.errors import FileUnreadable

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
            memory = mmap.mmap(
                file.fileno(), self.nbytes + skipped, access=mmap.ACCESS_READ, offset=self.begin - skipped
            )
        if at_random and hasattr(memory, "madvise"):
            memory.madvise(mmap.MADV_RANDOM)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            stored = torch.frombuffer(memory, dtype=torch.uint8, offset=skipped)
        if self.begin % self.dtype.itemsize:  # a view needs whole elements from the start of the memory on
            stored = stored.clone()
        return stored.view(self.dtype).view(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """What the file holds, without reading a tensor. FileUnreadable where it is cut short or is none."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(length) if 8 + length <= size else b""
        header = json.loads(text)
    except (OSError, ValueError) as error:  # ValueError: no JSON, or no text
        raise FileUnreadable(file, problem=f"no safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise FileUnreadable(file, problem=f"its header is a {type(header).__name__}, no object")
    header.pop("__metadata__", None)
    return {name: entry(file, name, facts, 8 + length, size) for name, facts in header.items()}


def entry(file: Path, name: str, facts: Any, start: int, size: int) -> StoredTensor:
    """One tensor of a header; the tensors begin at byte `start` of `size`."""
    try:
        shape, (begin, end) = tuple(facts["shape"]), facts["data_offsets"]
        dtype = DTYPES.get(facts["dtype"], str(facts["dtype"]))
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise FileUnreadable(file, problem=f"its header says {facts!r} of {name}") from None
    fits = whole and begin <= end and start + end <= size
    if fits and isinstance(dtype, torch.dtype):
        fits = end - begin == prod(shape) * dtype.itemsize
    if not fits:
        problem = f"{name}, {dtype} of shape {shape}, is said to lie in bytes {begin} to {end} of {size - start}"
        raise FileUnreadable(file, problem=problem)
    return StoredTensor(file, dtype, shape, start + begin, start + end)
