"""Kernels compile for GPUs that are not there, and report registers, spills, shared memory and PTX."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from v41.errors import KernelDoesNotCompile
from v41.lowering.cross_compile import Facts, Request, compile_for

KERNELS = str(Path(__file__).with_name("kernels.py"))
NORM = {"x": "*bf16", "w": "*fp32", "out": "*bf16", "columns": "i32"}
ARCHITECTURES = ("sm_90", "sm_100")


@pytest.fixture(scope="module")
def norms() -> list[Facts]:
    """The norm for both architectures, its rows not known and known to start on 16 bytes."""
    sizes = {"EPS": 1e-6, "BLOCK": 8192}
    return compile_for(
        [
            Request(KERNELS, "scale_rows", NORM, sizes, arch, divisible, {"num_warps": 8})
            for arch in ARCHITECTURES
            for divisible in ((), ("columns",))
        ]
    )


def test_reports_what_the_gpu_would_run(norms: list[Facts]) -> None:
    for facts, arch in zip(norms, (arch for arch in ARCHITECTURES for _ in range(2)), strict=True):
        assert (facts.arch, facts.warps, facts.spill_bytes) == (arch, 8, 0)
        assert 16 < facts.registers < 255 and 0 < facts.shared_bytes <= 4096
        assert f".target {arch}a" in facts.ptx and "cvt.rn.bf16" in facts.ptx


def test_divisible_sizes_widen_loads(norms: list[Facts]) -> None:
    for unknown, known in (norms[:2], norms[2:]):
        assert known.ptx.count("ld.global") < unknown.ptx.count("ld.global")


def test_reports_spills() -> None:
    types, one_warp = {"x": "*fp32", "out": "*fp32"}, {"num_warps": 1}
    (facts,) = compile_for([Request(KERNELS, "spill", types, {"N": 16384}, "sm_90", (), one_warp)])
    assert facts.spill_bytes > 0


def test_compiles_beside_an_interpreting_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (facts,) = compile_for([Request(KERNELS, "cast", {"x": "*fp32", "y": "*fp8e4nv"}, {"N": 128}, "sm_90")])
    assert os.environ["TRITON_INTERPRET"] == "1" and "cvt.rn.satfinite.e4m3x2.f32" in facts.ptx


def test_compiles_where_triton_can_keep_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{tmp_path}/file/cache")
    (facts,) = compile_for([Request(KERNELS, "cast", {"x": "*fp32", "y": "*fp8e4nv"}, {"N": 128}, "sm_90")])
    assert facts.registers > 0 and os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/file/cache"


@pytest.mark.parametrize(
    ("kernel", "arch", "words"), [("nothing", "sm_90", "no attribute"), ("cast", "sm_1", "unknown; there are sm_80")]
)
def test_names_what_does_not_compile(kernel: str, arch: str, words: str) -> None:
    with pytest.raises(KernelDoesNotCompile, match=words):
        compile_for([Request(KERNELS, kernel, {"x": "*fp32", "y": "*bf16"}, {"N": 128}, arch)])


def test_a_product_that_triton_gets_wrong_does_not_pass_for_compiled() -> None:
    """Over 16 numbers made from bytes its sum on a GPU is another: it was, by half, on an H200."""
    types = {"x": "*bf16", "y": "*u8", "out": "*fp32"}
    compile_for([Request(KERNELS, "decoded_product", types, {"N": 32}, "sm_90")])
    with pytest.raises(KernelDoesNotCompile, match=r"sums over too little: .*tensor<16x16xbf16"):
        compile_for([Request(KERNELS, "decoded_product", types, {"N": 16}, "sm_90")])
