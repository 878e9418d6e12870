"""host_tables: tables that no device holds, in the host's memory, where a look-up costs little.

    mapped      as a checkpoint leaves them: pages come in from the file as rows are looked up; takes little memory
    resident    in_memory(table)             all of it in this process's memory, in huge pages where the system has them
    pinned      on_device(resident, "cuda")  that memory as a tensor of the GPU: its kernels read rows over the bus

A look-up in a mapped or resident table is the host's, and no CUDA graph holds it: the device hands over row numbers and
waits for rows. A pinned table is like any other to a program: what reads it is captured, and prefetched on a side
stream. Huge pages spare a page fault and a miss of the TLB for nearly every row: a look-up of 256 tokens reads 6,144
rows, each in another page of 4 KiB.
"""

from __future__ import annotations

import mmap
import re
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41.errors import TableNotHeld

PART = 1 << 26  # bytes that are copied at once
READ_BY_ALL, MAPPED = 1, 2  # flags of cudaHostRegister: by every context; at an address of the device's
ADVICE = "MADV_HUGEPAGE"


def in_memory(table: Tensor) -> Tensor:
    """A copy of `table`, a contiguous one on the CPU, in memory of its own, in huge pages where the system has them.

    Read from front to end, as a file is read best. TableNotHeld where there is no memory for it.
    """
    try:
        memory = anonymous(max(table.nbytes, 1))
    except (OSError, OverflowError) as error:
        raise TableNotHeld("in_memory", bytes=table.nbytes, problem=str(error)) from error
    if hasattr(memory, "madvise") and hasattr(mmap, ADVICE):
        with suppress(OSError):  # of a kernel without huge pages: small ones hold the same
            memory.madvise(getattr(mmap, ADVICE))
    made = torch.frombuffer(memory, dtype=torch.uint8)[: table.nbytes]
    stored = table.detach().reshape(-1).view(torch.uint8)
    for begin in range(0, table.nbytes, PART):
        made[begin : begin + PART] = stored[begin : begin + PART]
    return made.view(table.dtype).view(table.shape)


def anonymous(length: int) -> mmap.mmap:
    """So much memory, of no file. Private: the system makes huge pages of shared memory only where it is told to."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, length)


def on_device(table: Tensor, device: torch.device | str) -> Tensor:
    """`table`, which lies in memory of this process (`in_memory`), as a tensor of `device`, a GPU.

    The memory stays where it is, is kept as long as the tensor is, and counts as locked. TableNotHeld where the driver
    refuses it, or the device reads something else there.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise TableNotHeld("on_device", bytes=table.nbytes, problem=f"{device} is no GPU here")
    cudart = torch.cuda.cudart()
    with torch.cuda.device(device):
        answer = cudart.cudaHostRegister(table.data_ptr(), table.nbytes, READ_BY_ALL | MAPPED)
        if int(answer):
            problem = f"cudaHostRegister says {cudart.cudaGetErrorString(answer)}"
            forget_refusal(device)
            raise TableNotHeld("on_device", bytes=table.nbytes, problem=problem)
        seen = torch.as_tensor(Registered(table), device=device)
    made = seen.view(table.dtype).view(table.shape)
    ends = torch.tensor([0, len(table) - 1])
    if not torch.equal(rows_of(made, ends.to(made.device)).cpu(), rows_of(table, ends)):
        raise TableNotHeld("on_device", bytes=table.nbytes, problem="the device reads other rows than the host")
    return made


def forget_refusal(device: torch.device) -> None:
    """CUDA keeps what it refused as the thread's last error, which the next launch would raise, whoever's it is: this
    is that launch, for whoever goes on with another way to hold the table."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """The bytes of these rows: few devices gather e4m3."""
    return table.view(torch.uint8)[rows]


class Registered:
    """Memory that a GPU may read; it is given back when nobody has this any more, which a tensor made of it does."""

    def __init__(self, table: Tensor) -> None:
        self.table = table  # held: its memory must outlive the registration
        facts: dict[str, Any] = {"shape": (table.nbytes,), "typestr": "|u1", "data": (table.data_ptr(), False)}
        self.__cuda_array_interface__ = {**facts, "strides": None, "version": 3}
        weakref.finalize(self, give_back, table.data_ptr()).atexit = False  # the process's end gives all back


def give_back(address: int) -> None:
    torch.cuda.synchronize()  # a kernel that is on its way may read there
    torch.cuda.cudart().cudaHostUnregister(address)


def huge_bytes(table: Tensor) -> int | None:
    """How much of `table` lies in huge pages; None where the system does not tell."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    begin, end, found, inside = table.data_ptr(), table.data_ptr() + table.nbytes, 0, False
    for line in smaps.read_text().splitlines():
        if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(region[1], 16) < end and int(region[2], 16) > begin
        elif inside and (told := re.match(r"(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped): +(\d+) kB", line)):
            found += int(told[1]) * 1024
    return found
