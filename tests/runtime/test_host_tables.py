"""host_tables: tables in memory have the file's bits, in huge pages where the system has them; what fails says why."""

from __future__ import annotations

import gc
import mmap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from v41.errors import TableNotHeld
from v41.model_def.stored_tensors import read_header
from v41.runtime import host_tables
from v41.runtime.host_tables import ADVICE, huge_bytes, in_memory, on_device

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_huge_pages = pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text() or not hasattr(mmap, ADVICE), reason="no huge pages here"
)


def table(rows: int = 40, width: int = 256) -> Tensor:
    drawn = torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    return drawn.view(torch.float8_e4m3fn)


def same(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_a_table_in_memory_is_a_copy(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "PART", 1000)  # of no whole number of rows
    stored = table(rows)
    made = in_memory(stored)
    assert same(made, stored) and not made.requires_grad
    kept = stored.clone()
    stored.view(torch.uint8).zero_()
    assert same(made, kept)
    if rows:
        assert made.data_ptr() != stored.data_ptr()


def test_a_mapped_table_is_read_into_memory(tmp_path: Path) -> None:
    save_file({"weight": table()}, tmp_path / "some")
    mapped = read_header(tmp_path / "some")["weight"].mapped(at_random=True)
    made = in_memory(mapped)
    (tmp_path / "some").write_bytes(b"")  # the file may go: nothing of it is read any more
    assert same(made, table())


@has_huge_pages
def test_it_lies_in_huge_pages_where_the_system_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.ones(16 << 20, dtype=torch.uint8)
    made = in_memory(whole)
    huge = huge_bytes(made)
    if huge == 0:
        pytest.skip("the system has no huge page to give just now")
    assert huge is not None and huge >= 8 << 20
    if "[always]" not in ENABLED.read_text():
        monkeypatch.setattr(host_tables, "ADVICE", "MADV_OF_NO_SYSTEM")
        assert huge_bytes(in_memory(whole)) == 0


def test_a_system_without_huge_pages_holds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Refusing(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            asked.append(option)
            raise OSError(22, "Invalid argument")

    def refusing(length: int) -> mmap.mmap:
        return Refusing(-1, length)

    monkeypatch.setattr(host_tables, "anonymous", refusing)
    assert same(in_memory(table()), table()) and asked == [getattr(mmap, ADVICE)] * hasattr(mmap, ADVICE)


def test_a_table_for_which_there_is_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(length: int) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_tables, "anonymous", none)
    with pytest.raises(TableNotHeld, match="Cannot allocate memory") as caught:
        in_memory(table())
    assert caught.value.facts["bytes"] == 40 * 256


def test_a_cpu_pins_nothing() -> None:
    with pytest.raises(TableNotHeld, match="cpu is no GPU here"):
        on_device(table(), "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(TableNotHeld, match="cuda is no GPU here"):
            on_device(table(), "cuda")


class Cudart:
    """Stands in for the driver: what it was asked, what it answers, and the error that the next launch raises."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.last, self.calls = code, 0, list[Any]()

    def cudaHostRegister(self, *given: int) -> int:
        self.calls.append(("register", *given))
        self.last = self.code
        return self.code

    def launch(self, *_: Any, **__: Any) -> None:
        last, self.last = self.last, 0
        if last:
            raise RuntimeError(f"CUDA error {last}")

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """A GPU that reads the host's memory where it lies, as one does that shares its addresses."""
    made = Cudart()

    class OfTheHost:
        def __init__(self, given: Any) -> None:
            self.given, self.__array_interface__ = given, given.__cuda_array_interface__

    def seen(given: Any, device: Any) -> Tensor:
        """A tensor of the same memory that keeps `given` as long as it has that."""
        return torch.from_numpy(np.asarray(OfTheHost(given)))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: made.calls.append("synchronize"))
    monkeypatch.setattr(torch, "as_tensor", seen)
    monkeypatch.setattr(torch, "ones", made.launch)
    return made


def test_a_pinned_table_is_registered_as_long_as_it_is_held(driver: Cudart) -> None:
    resident = in_memory(table())
    address = resident.data_ptr()
    made = on_device(resident, "cuda")
    assert same(made, table()) and driver.calls == [("register", address, 40 * 256, 3)]
    del made
    gc.collect()
    assert driver.calls[1:] == ["synchronize", ("unregister", address)] and same(resident, table())


def test_a_driver_that_refuses_is_quoted(driver: Cudart) -> None:
    driver.code = 2
    with pytest.raises(TableNotHeld, match="cudaHostRegister says error 2"):
        on_device(in_memory(table()), "cuda")
    assert len(driver.calls) == 1


def test_what_a_driver_refused_is_not_raised_by_the_next_launch(driver: Cudart) -> None:
    """Whoever leaves the table where it is goes on with the GPU."""
    driver.code = 2
    with pytest.raises(TableNotHeld, match="cudaHostRegister says error 2"):
        on_device(in_memory(table()), "cuda")
    driver.launch()


def test_a_device_that_reads_other_rows_is_noticed(driver: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    resident = in_memory(table())
    monkeypatch.setattr(host_tables, "rows_of", lambda read, rows: torch.full((2,), read is resident))
    with pytest.raises(TableNotHeld, match="reads other rows"):
        on_device(resident, "cuda")
    gc.collect()
    assert driver.calls[-1] == ("unregister", resident.data_ptr())
