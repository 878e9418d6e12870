"""bench tables: Engram look-ups in tables of the host, mapped from a file, in memory, or read by the GPU itself.

    mapped      as a checkpoint leaves a table: pages come in as they are touched, from the system's memory, which holds
                the file; cold: from the disk
    huge file   the same with huge pages advised for the file's mapping
    small       in memory of the process, in pages of 4 KiB
    resident    the same in huge pages (host_tables.in_memory)
    pinned      resident and registered: the GPU gathers (host_tables.on_device); captured: in a CUDA graph

Every look-up draws new rows, orders x heads of them a token, and a file is mapped anew for each: as in a table so large
that hardly a page was touched before. gather us: what the host takes to gather rows; faults: pages that the system had
to bring in for that, major: those that it read from the disk. us: the model's whole look-up, on a GPU from row numbers
there to values there. Medians. Values of all are compared, bit for bit. The table is written to a temporary file.
"""

from __future__ import annotations

import mmap
import os
import resource
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from v41.errors import BenchNeedsGPU
from v41.model_def.config import V41Config
from v41.model_def.engram import EngramTable
from v41.model_def.stored_tensors import StoredTensor, private_map, read_header
from v41.runtime import host_tables
from v41.tools.bench import timing
from v41.tools.tables import add, table

COUNT = 40  # look-ups, of which the median counts
Record = dict[str, Any]


def bench_command(arguments: Namespace) -> int:
    """What `v41 bench tables` does."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise BenchNeedsGPU("v41 bench tables", found="torch sees none; --device cpu looks up there")
    config = V41Config()
    result: Record = {
        "case": "tables", **timing.provenance(), "table_rows": arguments.table_rows, "width": config.engram_head_dim,
        "rows_a_token": (config.engram_max_ngram_size - 1) * config.engram_n_heads, "huge_pages": huge_pages(),
        "records": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        file = write_table(Path(folder) / "table.safetensors", arguments.table_rows, config.engram_head_dim)
        for record in records(file, arguments.rows, result["rows_a_token"], arguments.device):
            result["records"].append(record)
            timing.save(result, arguments.out)
    Console(width=140).print(overview(result["records"]))
    good = all(record["same_bits"] for record in result["records"])
    print(f"{'holds' if good else 'does not hold'}: the same bits from every table; written to "
          f"{timing.save(result, arguments.out)}")  # fmt: skip
    return 0 if good else 1


def huge_pages() -> str | None:
    """What the system says of them: "always [madvise] never"."""
    told = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return told.read_text().strip() if told.exists() else None


def write_table(file: Path, rows: int, width: int) -> Path:
    """A table of random bytes that are numbers, on the disk."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 0x7E, (rows, width), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (rows, width // 32), dtype=torch.uint8, generator=generator)
    save_file({"weight": weight, "scale": scale}, file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return file


def records(file: Path, sizes: list[int], per_token: int, device: str) -> Iterator[Record]:
    """A record for each table and number of tokens."""
    stored = read_header(file)
    wanted: dict[int, Tensor] = {}
    for name, make in layouts(stored, device).items():
        for tokens in sizes:
            (forget if "cold" in name else read)(file)
            made = make()
            draw = torch.Generator().manual_seed(tokens)
            call = look_up(made)
            given = [torch.randint(len(made.weight), (tokens, per_token), generator=draw) for _ in range(COUNT)]
            record: Record = {"table": name, "tokens": tokens, "huge_mib": mib(made.weight)}
            if made.weight.device.type == "cpu":
                record |= gathers(make, given)
            record["us"] = timed(call, [torch.randint_like(rows, len(made.weight)).to(device) for rows in given])
            if name == "pinned" and device == "cuda":
                sets = [(rows.to(device),) for rows in given]
                record["captured_us"] = round(timing.microseconds(call, sets, calls=COUNT), 2)
            found = call(given[0].to(device)).cpu()
            first = wanted.setdefault(tokens, found)
            record["same_bits"] = torch.equal(first.view(torch.uint8), found.view(torch.uint8))
            yield record


def layouts(stored: dict[str, StoredTensor], device: str) -> dict[str, Callable[[], EngramTable]]:
    """Name -> what makes the table so. Those in memory are made once."""
    weight, scale = stored["weight"], stored["scale"]

    def small() -> EngramTable:
        return of(weight.mapped().clone(), scale.mapped().clone())

    def resident() -> EngramTable:
        return of(host_tables.in_memory(weight.mapped()), host_tables.in_memory(scale.mapped()))

    def mapped() -> EngramTable:
        return of(weight.mapped(at_random=True), scale.mapped(at_random=True))

    kept: dict[str, EngramTable] = {}

    def once(name: str, make: Callable[[], EngramTable]) -> Callable[[], EngramTable]:
        return lambda: kept[name] if name in kept else kept.setdefault(name, make())

    def pinned() -> EngramTable:
        made = once("resident", resident)()
        return of(*(host_tables.on_device(each.data, device) for each in (made.weight, made.scale)))

    found = {
        "mapped, cold": mapped, "mapped": mapped, "huge file": lambda: of(advised(weight), advised(scale)),
        "small": once("small", small), "resident": once("resident", resident),
    }  # fmt: skip
    return found | ({"pinned": once("pinned", pinned)} if device == "cuda" else {})


def of(weight: Tensor, scale: Tensor) -> EngramTable:
    with torch.device("meta"):
        made = EngramTable(1, weight.shape[1])
    made.weight, made.scale = (nn.Parameter(each, requires_grad=False) for each in (weight, scale))
    return made


def advised(stored: StoredTensor) -> Tensor:
    """`stored` mapped, with huge pages advised."""
    skipped = stored.begin % mmap.ALLOCATIONGRANULARITY
    with stored.file.open("rb") as file:
        memory = private_map(file, stored.begin - skipped, stored.nbytes + skipped)
    if hasattr(mmap, host_tables.ADVICE):
        memory.madvise(getattr(mmap, host_tables.ADVICE))
    made = torch.frombuffer(memory, dtype=torch.uint8, offset=skipped)
    assert isinstance(stored.dtype, torch.dtype)
    return made.view(stored.dtype).view(stored.shape)


def forget(file: Path) -> None:
    """The system no longer holds the file in its memory, as far as it listens."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(file: Path) -> None:
    """The system holds the file in its memory."""
    with file.open("rb") as opened:
        while opened.read(1 << 24):
            pass


def look_up(made: EngramTable) -> Callable[[Tensor], Tensor]:
    def call(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return made(rows)

    return call


def gathers(make: Callable[[], EngramTable], given: list[Tensor]) -> Record:
    """What the host does for a look-up: each of other rows."""
    us, minor, major = list[float](), list[int](), list[int]()
    for rows in given:
        made = make()
        weight, scale = made.weight.view(torch.uint8), made.scale
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter_ns()
        F.embedding(rows, weight)
        F.embedding(rows, scale)
        us.append((time.perf_counter_ns() - began) / 1000)
        after = resource.getrusage(resource.RUSAGE_SELF)
        minor.append(after.ru_minflt - before.ru_minflt)
        major.append(after.ru_majflt - before.ru_majflt)
    told: dict[str, Sequence[float]] = {"gather_us": us, "faults": minor, "major": major}
    return {name: round(statistics.median(values), 1) for name, values in told.items()}


def timed(call: Callable[[Tensor], Tensor], given: list[Tensor]) -> float:
    """µs of a whole look-up, until its values are there."""
    us = list[float]()
    for rows in given:
        if rows.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter_ns()
        call(rows)
        if rows.is_cuda:
            torch.cuda.synchronize()
        us.append((time.perf_counter_ns() - began) / 1000)
    return round(statistics.median(us), 1)


def mib(weight: Tensor) -> float | None:
    huge = host_tables.huge_bytes(weight) if weight.device.type == "cpu" else None
    return None if huge is None else round(huge / 2**20, 1)


def overview(found: list[Record]) -> Any:
    columns = ("tokens", "gather us", "faults", "major", "us", "captured us", "MiB in huge pages", "same bits")
    made = table("table", *columns)
    for r in found:
        host = (r.get(name) for name in ("gather_us", "faults", "major"))
        same = "yes" if r["same_bits"] else "no"
        add(made, r["table"], r["tokens"], *host, r["us"], r.get("captured_us"), r["huge_mib"], same)
    return made
