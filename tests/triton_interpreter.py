"""interpreter: Triton kernels run on the CPU, with Triton's interpreter repaired, in a process of their own.

    def test_doubles(interpreter):  # the fixture of tests/lowering/conftest.py, one process a test session
        y = interpreter.call(path, "double", x)  # a host function of the file, which launches and returns
        x, y = interpreter.launch(path, "kernel", (4,), x, y, 64, BLOCK=16)  # a kernel: its tensors as it leaves them

Why a process: Triton reads TRITON_INTERPRET when `@triton.jit` runs, its own library (tl.sum, tl.max) included, so
the variable must be set before the first `import triton`, and such a process can never compile a kernel. Why files:
Triton parses the source of the kernel. Tensors travel to the process and back as copies; what fails there is raised
here with its traceback.

Why a repair: the interpreter of Triton 3.6 to 3.9 keeps bf16 and fp8 as bit patterns in numpy. It truncates fp32 to
bf16, mis-rounds fp8, multiplies, adds, compares, sums and `tl.dot`s the patterns themselves, and lets NaN through
where the GPU's min and max drop it; none of this says a word. `repair()` makes casts torch's casts, saturating for
fp8 as cvt.rn.satfinite does, computes on narrow floats in fp32 with one rounding an operation, fuses tl.fma, rounds
what a `tl.dot` in tf32 reads, sums a dot's exact products in fp64 so that no order shows, and sums over an axis as a
tree in the tensor's own type. Not repaired: RTZ casts are refused; argmax and argmin among NaN depend on the order on
a GPU and take the first NaN here; the sign of a zero among equals, and last bits of exp, log, rsqrt and `/`, are
numpy's; a * b + c is not contracted unless written tl.fma.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent


class Interpreter:
    """A process that interprets kernels. `repaired=False` leaves Triton as it is, for the tests of the repair."""

    def __init__(self, repaired: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.triton_interpreter", *(["--repair"] if repaired else [])],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def call(self, path: str | Path, function: str, *args: Any, **kwargs: Any) -> Any:
        """What `function` of the file `path` returns there."""
        return self._ask(str(path), function, None, args, kwargs)

    def launch(
        self, path: str | Path, kernel: str, grid: tuple[int, ...], *args: Any, **constants: Any
    ) -> list[Tensor]:
        """The tensor arguments, in order, as `kernel` leaves them."""
        return self._ask(str(path), kernel, grid, args, constants)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _ask(self, *question: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        send(question, self.process.stdin)
        failed, answer = receive(self.process.stdout)
        if failed:
            raise RuntimeError(answer)
        return answer


def send(message: Any, pipe: IO[bytes]) -> None:
    """Writes one message; torch's format, since plain pickle knows no fp8."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    pipe.write(len(buffer.getbuffer()).to_bytes(8, "little") + buffer.getbuffer())
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Reads one message; EOFError where the other side is gone."""
    length = pipe.read(8)
    if not length:
        raise EOFError("the interpreter's process ended")
    return torch.load(io.BytesIO(pipe.read(int.from_bytes(length, "little"))), weights_only=False)


def serve(repaired: bool) -> None:
    """Answers questions until the pipe closes. What kernels print goes to stderr: stdout carries the answers."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if repaired:
        repair()
    from v41.lowering.cross_compile import load

    modules: dict[tuple[str, int], Any] = {}
    while True:
        try:
            path, name, grid, args, kwargs = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            key = (path, Path(path).stat().st_mtime_ns)
            module = modules[key] if key in modules else modules.setdefault(key, load(path))
            function = getattr(module, name)
            result = (function if grid is None else function[grid])(*args, **kwargs)
            answer = (False, result if grid is None else [arg for arg in args if isinstance(arg, Tensor)])
        except Exception:  # handed to the process that asked, which raises
            answer = (True, traceback.format_exc())
        send(answer, answers)


def repair() -> None:
    """Repairs the interpreter of this process; a second call changes nothing. TRITON_INTERPRET must be set already."""
    import triton.language as tl
    from triton.runtime import interpreter as it

    if os.environ.get("TRITON_INTERPRET") != "1" or not isinstance(tl.sum, it.InterpretedFunction):
        raise RuntimeError("set TRITON_INTERPRET=1 before the first `import triton`, or use the `interpreter` fixture")
    if not hasattr(it.InterpreterBuilder, "v41_repaired"):
        _repair(tl, it)


def _repair(tl: Any, it: Any) -> None:
    import numpy as np

    narrow = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    builder, Handle = it.InterpreterBuilder, it.TensorHandle
    plain_cast, plain_binary, plain_unary = builder.cast_impl, builder.binary_op, builder.unary_op
    plain_dot, plain_sum = builder.create_dot, it.ReduceOps.sum

    def is_bits(handle: Any) -> bool:  # a comparison keeps its operands' type and holds bools
        return handle.dtype.scalar in narrow and handle.data.dtype != np.bool_

    def values(handle: Any) -> Tensor:
        tensor = torch.from_numpy(np.array(handle.data))
        return tensor.view(narrow[handle.dtype.scalar]) if is_bits(handle) else tensor

    def wide(handle: Any) -> Any:
        return values(handle).float().numpy() if is_bits(handle) else handle.data

    def rounded(tensor: Tensor, kind: Any) -> Any:
        if kind not in narrow:
            exact = tensor.float() if tensor.dtype in narrow.values() else tensor
            return Handle(exact.numpy().astype(it._get_np_dtype(kind)), kind)
        if kind.primitive_bitwidth == 8:
            limit = torch.finfo(narrow[kind]).max
            tensor = tensor.float().clamp(-limit, limit)
        bits = torch.int16 if kind.primitive_bitwidth == 16 else torch.uint8
        return Handle(tensor.to(narrow[kind]).view(bits).numpy().view(it._get_np_dtype(kind)), kind)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if is_bits(source) or target.scalar in narrow:
            return rounded(values(source), target.scalar)
        return plain_cast(self, source, target)

    def fp_to_fp(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if mode == it._ir.ROUNDING_MODE.RTZ:
            raise NotImplementedError("a cast that rounds towards zero is not interpreted")
        return cast(self, source, target)

    def binary(self: Any, a: Any, b: Any, op: Any) -> Any:
        if not is_bits(a):
            return plain_binary(self, a, b, op)
        kind, result = a.dtype.scalar, op(wide(a), wide(b))
        return Handle(result, kind) if result.dtype == np.bool_ else rounded(torch.from_numpy(result), kind)

    def unary(self: Any, a: Any, op: Any) -> Any:
        return rounded(torch.from_numpy(op(wide(a))), a.dtype.scalar) if is_bits(a) else plain_unary(self, a, op)

    def clamp(self: Any, x: Any, low: Any, high: Any, nan: Any) -> Any:
        keeps = nan == it._ir.PROPAGATE_NAN.ALL
        up, down = (np.maximum, np.minimum) if keeps else (np.fmax, np.fmin)
        return binary(self, binary(self, x, low, up), high, down)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not z.dtype.scalar.is_floating():
            return Handle(x.data * y.data + z.data, z.dtype.scalar)
        x64, y64, z64 = (np.asarray(wide(handle), np.float64) for handle in (x, y, z))
        return rounded(torch.from_numpy(x64 * y64 + z64), z.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if not a.dtype.scalar.is_floating():
            return plain_dot(self, a, b, d, precision, imprecise)
        sides = [np.array(wide(side)) for side in (a, b)]
        if precision == it._ir.INPUT_PRECISION.TF32 and a.dtype.scalar == tl.float32:
            for side in sides:  # to 10 bits, ties away from zero, as cvt.rna.tf32 does
                bits = side.view(np.uint32)
                bits[np.isfinite(side)] += 0x1000
                bits &= np.uint32(0xFFFFE000)
        product = np.matmul(sides[0].astype(np.float64), sides[1].astype(np.float64)) + wide(d)
        return rounded(torch.from_numpy(product), d.dtype.scalar)

    def tree_sum(self: Any, input: Any) -> Any:
        if not input.dtype.is_floating():
            return plain_sum(self, input)
        handle = input.handle
        data = handle.data.reshape(-1) if self.axis is None else np.moveaxis(handle.data, self.axis, 0)
        while len(data) > 1:  # blocks are powers of two
            halves = (Handle(half, handle.dtype) for half in np.split(data, 2))
            data = binary(it.interpreter_builder, *halves, np.add).data
        data = data[0]
        if self.keep_dims:
            data = data.reshape((1,) * handle.data.ndim) if self.axis is None else np.expand_dims(data, self.axis)
        return self.to_tensor(data, input.dtype)

    builder.cast_impl, builder.create_fp_to_fp, builder.binary_op, builder.unary_op = cast, fp_to_fp, binary, unary
    builder.create_clampf, builder.create_fma, builder.create_dot = clamp, fma, dot
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.get_bf16 = lambda self, value: rounded(torch.tensor([value], dtype=torch.float32), tl.bfloat16)
    it.ReduceOps.sum = tree_sum
    builder.v41_repaired = True


if __name__ == "__main__":
    serve("--repair" in sys.argv[1:])
