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
what a `tl.dot` in tf32 reads, sums a dot's exact products in fp64, 64 numbers at a time, so that no order shows and one
long dot gives what several do that go on from each other (a GPU goes by 16), and sums over an axis as a tree in the
tensor's own type. Not repaired: RTZ casts are refused; argmax and argmin among NaN depend on the order on
a GPU and take the first NaN here; NaN clamped to -c and c is either (a GPU has one instruction for that); the sign of
a zero among equals, and last bits of exp, log, rsqrt and `/`, are numpy's; a * b + c is not contracted unless written
tl.fma.
"""

from __future__ import annotations

import importlib
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
    from triton.runtime.interpreter import InterpretedFunction

    if os.environ.get("TRITON_INTERPRET") != "1" or not isinstance(tl.sum, InterpretedFunction):
        raise RuntimeError("set TRITON_INTERPRET=1 before the first `import triton`, or use the `interpreter` fixture")
    importlib.import_module("tests.triton_repair")


if __name__ == "__main__":
    serve("--repair" in sys.argv[1:])
