"""The repaired interpreter agrees with torch's casts bit for bit and with fp64; the plain one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_interpreter import Interpreter, repair
from v41.lowering.cross_compile import load

KERNELS = Path(__file__).with_name("kernels.py")
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NAN = float("nan")


class Gpu:
    """Launches the same kernels on a real GPU."""

    def launch(self, path: Path, kernel: str, grid: tuple[int, ...], *args: Tensor, **constants: Any) -> list[Tensor]:
        moved = [arg.cuda() for arg in args]
        getattr(load(str(path)), kernel)[grid](*moved, **constants)
        return [arg.cpu() for arg in moved]


@pytest.fixture(scope="module")
def plain() -> Iterator[Interpreter]:
    process = Interpreter(repaired=False)
    yield process
    process.close()


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit; any NaN equals any NaN, as no two devices agree on its bits."""
    found, expected = found.float(), expected.float()
    bits = found.view(torch.int32) == expected.view(torch.int32)
    return bool((bits | (found.isnan() & expected.isnan())).all())


def cast(process: Interpreter | Gpu, x: Tensor, dtype: torch.dtype) -> Tensor:
    block = min(len(x), 4096)
    return process.launch(KERNELS, "cast", (len(x) // block,), x, torch.empty(len(x), dtype=dtype), N=block)[1]


def hard_floats() -> Tensor:
    """fp32 of every exponent; halfway points between bf16 and between fp8 values; zeros, denormals, infinities, NaN."""
    random = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (2**16,), generator=random).to(torch.int32)
    ties = (anything[: 2**14] & ~0xFFFF) | 0x8000
    fp8 = [torch.arange(256, dtype=torch.uint8).view(dtype).float().sort().values for dtype in FP8]
    halfway = torch.cat([(values[1:] + values[:-1]) / 2 for values in fp8])
    special = torch.tensor([0.0, -0.0, NAN, float("inf"), -float("inf"), 448.0, 464.0, 57344.0, 61440.0, 1e-45, 3.4e38])
    above = halfway.nextafter(special[3])
    found = torch.cat([anything.view(torch.float32), ties.view(torch.float32), halfway, above, special])
    return torch.nn.functional.pad(found, (0, 2**17 - len(found)))


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What cvt.rn.satfinite returns: the largest finite value beyond the range, infinity included."""
    limit = torch.finfo(dtype).max
    return x.float().clamp(-limit, limit).to(dtype)


def test_every_bf16_pattern_widens(interpreter: Interpreter, plain: Interpreter) -> None:
    assert same(cast(interpreter, ALL_BF16, torch.float32), ALL_BF16)
    assert not same(cast(plain, ALL_BF16, torch.float32), ALL_BF16)


@pytest.mark.parametrize("dtype", FP8)
def test_every_fp8_pattern_widens(interpreter: Interpreter, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert same(cast(interpreter, every, torch.float32), every)
    assert same(cast(interpreter, every, torch.bfloat16), every.float().bfloat16())


def test_fp32_rounds_to_bf16(interpreter: Interpreter, plain: Interpreter) -> None:
    x = hard_floats()
    assert same(cast(interpreter, x, torch.bfloat16), x.bfloat16())
    assert not same(cast(plain, x, torch.bfloat16), x.bfloat16())


@pytest.mark.parametrize("dtype", FP8)
def test_rounds_to_fp8_and_saturates(interpreter: Interpreter, plain: Interpreter, dtype: torch.dtype) -> None:
    x = hard_floats()
    assert same(cast(interpreter, x, dtype), saturated(x, dtype))
    assert same(cast(interpreter, ALL_BF16, dtype), saturated(ALL_BF16, dtype))
    assert not same(cast(plain, x, dtype), saturated(x, dtype))


def test_integers_round_to_bf16(interpreter: Interpreter) -> None:
    x = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    assert same(cast(interpreter, x, torch.bfloat16), x.float().bfloat16())


BF16: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "neg": lambda a, b: 0 - a,
    "scale": lambda a, b: a * 3,
    "where": torch.minimum,
    "fma": lambda a, b: (a.double() * b.double() + a.double()).bfloat16(),
    "max": torch.maximum,
    "min": torch.minimum,
    "clamp": lambda a, b: a.clamp(-1, 2),
}


@pytest.mark.parametrize("op", BF16)
def test_bf16_arithmetic_rounds_once(interpreter: Interpreter, op: str) -> None:
    x, y = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = interpreter.launch(KERNELS, "arithmetic", (1,), x, y, torch.empty_like(x), OP=op, N=len(x))[2]
    assert same(found, BF16[op](x, y))


def test_fp32_fma_is_fused(interpreter: Interpreter) -> None:
    """Of the plain interpreters only the oldest need the repair: 3.6 rounds twice, 3.9 once."""
    x, y = torch.randn(2, 4096, generator=torch.Generator().manual_seed(2))
    fused, twice = (x.double() * y.double() + x.double()).float(), x * y + x
    found = interpreter.launch(KERNELS, "arithmetic", (1,), x, y, torch.empty_like(x), OP="fma", N=len(x))[2]
    assert same(found, fused) and not same(twice, fused)


@pytest.mark.parametrize(
    ("op", "expected"),
    [("max", [1, 1, NAN, 3]), ("min", [1, 1, NAN, 2]), ("max_nan", [NAN, NAN, NAN, 3]), ("clamp", [-1, 1, -1, 2])],
)
def test_nan_is_dropped_unless_asked_for(interpreter: Interpreter, op: str, expected: list[float]) -> None:
    x, y = torch.tensor([NAN, 1, NAN, 2]), torch.tensor([1, NAN, NAN, 3])
    found = interpreter.launch(KERNELS, "arithmetic", (1,), x, y, torch.empty(4), OP=op, N=4)[2]
    assert same(found, torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *FP8])
def test_dot_sums_exact_products(interpreter: Interpreter, plain: Interpreter, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    x, y = torch.randn(16, 64, generator=random).to(dtype), torch.randn(64, 32, generator=random).to(dtype)
    exact = x.double() @ y.double()

    def error(process: Interpreter, precision: str) -> float:
        sizes = {"M": 16, "N": 32, "K": 64, "PRECISION": precision}
        found = process.launch(KERNELS, "dot", (1,), x, y, torch.empty(16, 32), **sizes)[2]
        return float((found - exact).abs().max() / exact.abs().max())

    assert error(interpreter, "ieee") < 1e-7
    if dtype == torch.float32:
        assert 1e-5 < error(interpreter, "tf32") < 1e-3  # what a forgotten input_precision costs on a GPU
    if dtype == torch.bfloat16:
        assert not error(plain, "ieee") < 1


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_as_a_tree_in_its_own_type(interpreter: Interpreter, dtype: torch.dtype, axis: int) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    tree = x.movedim(axis, 0)
    while len(tree) > 1:
        tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
    sizes = {"M": 16, "N": 64, "AXIS": axis, "OP": "sum"}
    found = interpreter.launch(KERNELS, "reduce", (1,), x, torch.empty(len(tree[0]), dtype=dtype), **sizes)[1]
    assert same(found, tree[0])


def test_max_drops_nan(interpreter: Interpreter) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected = x.float().max(1).values
    x[:, 7], expected[0] = torch.where(x[:, 7] == expected, x[:, 7], NAN), NAN
    x[0] = NAN
    found = interpreter.launch(KERNELS, "reduce", (1,), x, torch.empty(4), M=4, N=64, AXIS=1, OP="max")[1]
    assert same(found, expected)


def test_a_host_function_returns_and_an_error_comes_back(interpreter: Interpreter) -> None:
    x, w = torch.randn(3, 48).bfloat16(), torch.randn(48)
    found = interpreter.call(KERNELS, "rms_norm", x, w, 1e-6)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-6)
    with pytest.raises(RuntimeError, match="no_such_function"):
        interpreter.call(KERNELS, "no_such_function")
    assert interpreter.call(KERNELS, "rms_norm", x, w, 1e-6).equal(found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_agrees(interpreter: Interpreter) -> None:
    """What the repair claims of GPUs, on one: casts and saturation, bf16 arithmetic, fma, NaN in min, max and clamp."""
    gpu = Gpu()
    for x, dtype in [(ALL_BF16, torch.float32), *((hard_floats(), dtype) for dtype in (torch.bfloat16, *FP8))]:
        assert same(cast(gpu, x, dtype), cast(interpreter, x, dtype)), (x.dtype, dtype)
    for dtype in FP8:
        assert same(cast(gpu, ALL_BF16, dtype), cast(interpreter, ALL_BF16, dtype)), dtype
    x, y = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1))
    x[:8] = y[4:12] = NAN
    for kind in (torch.float32, torch.bfloat16):
        for op in ("add", "sub", "mul", "neg", "scale", "where", "fma", "max", "min", "max_nan", "clamp"):
            args = (x.to(kind), y.to(kind), torch.empty(4096, dtype=kind))
            found, expected = (
                process.launch(KERNELS, "arithmetic", (1,), *args, OP=op, N=4096)[2] for process in (gpu, interpreter)
            )
            assert same(found, expected), (kind, op)


def test_repair_refuses_a_process_that_compiles() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        repair()
