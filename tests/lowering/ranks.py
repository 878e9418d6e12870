"""ranks: processes that interpret kernels side by side, on memory that all of them map: a group without GPUs.

    with Ranks(2) as ranks:
        results = ranks.run(kernel, [[inputs of rank 0], [inputs of rank 1]], calls=3)       outputs a rank and call

What the interpreter lacks is added in each process: the repair of triton_repair.py, and twins of the PTX of
templates/all_reduce/protocol.py, found by their text. A twin may sleep, as long as the process is told to: so ranks
drift apart in the middle of a kernel, too. Loads, stores and atomics of the interpreter touch the mapped memory itself,
element by element, an element of 4 or 8 bytes in one piece; its atomics are the processor's.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.triton_interpreter import ROOT, receive, repair, send
from v41.errors import V41Error

WORDS = 1 << 20  # of each rank's memory
COUNTERS = 1 << 14


@dataclass(frozen=True)
class Raised:
    """An error of v41 on its way, for exceptions that take facts do not travel."""

    kind: type[V41Error]
    where: object
    facts: dict[str, Any]


class Ranks:
    """`count` processes, each a rank."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.folder = tempfile.TemporaryDirectory()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.lowering.ranks", str(rank), str(count), self.folder.name],
                cwd=ROOT,
                env={**os.environ, "TRITON_INTERPRET": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(count)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        self.folder.cleanup()

    def fresh(self, patience: float = 60.0) -> None:
        """All memory zero, no channels; ranks wait for each other so many seconds."""
        for rank in range(self.count):
            memory(Path(self.folder.name), rank).zero_()
        self._all([("fresh", patience)] * self.count)

    def hurry(self, patience: float) -> None:
        """From now on ranks wait for each other so many seconds."""
        self._all([("hurry", patience)] * self.count)

    def run(self, kernel: Any, inputs: Sequence[Sequence[Any]], way: Any = None, calls: int = 1, *,
            sleeps: Sequence[float] | None = None, holds: tuple[int, str, float] | None = None,
            present: Sequence[int] | None = None) -> list[Any]:  # fmt: skip
        """A rank's list of calls, each a list of outputs; an error in place of the list where a rank raised one.

        inputs: of each rank; they change from call to call (`shifted`). sleeps: of each rank, the longest nap in
        seconds between and within calls. holds: a rank that stops after each word sent ("put") or flag set ("atomic"),
        and for how long. present: the ranks that take part.
        """
        sleeps = sleeps or [0.0] * self.count
        present = range(self.count) if present is None else present
        return self._all([("run", kernel, inputs[rank], way, calls, sleeps[rank], holds) if rank in present else None
                          for rank in range(self.count)])  # fmt: skip

    def add(self, times: int) -> int:
        """What a counter holds to which every rank has added 1 so often."""
        self._all([("add", times)] * self.count)
        return int(memory(Path(self.folder.name), 0)[0])

    def _all(self, questions: Sequence[Any]) -> list[Any]:
        asked = [(p, q) for p, q in zip(self.processes, questions, strict=True) if q is not None]
        for process, question in asked:
            send(question, process.stdin)  # type: ignore[arg-type]
        heard = [receive(process.stdout) for process, _ in asked]  # type: ignore[arg-type]
        return [each.kind(each.where, **each.facts) if isinstance(each, Raised) else each for each in heard]


def shifted(inputs: Sequence[Any], call: int) -> list[Any]:
    """The inputs of call number `call`: rows of floats rolled, so that what is left from a call before shows."""
    return [each.roll(call, -1) if isinstance(each, Tensor) and each.is_floating_point() else each for each in inputs]


def memory(folder: Path, rank: int) -> Tensor:
    return torch.from_file(str(folder / str(rank)), shared=True, size=WORDS, dtype=torch.int32)


# ---- in a rank's process


class Rank:
    def __init__(self, rank: int, count: int, folder: Path) -> None:
        self.rank, self.count, self.folder = rank, count, folder
        self.sleep = 0.0
        self.held: dict[str, float] = {}
        self.fresh(60.0)

    def fresh(self, patience: float) -> None:
        from v41.channels import Workspace

        self.random = random.Random(self.rank)
        memories = tuple(memory(self.folder, rank) for rank in range(self.count))
        zeros = torch.zeros(COUNTERS, dtype=torch.int32)
        self.workspace = Workspace(self.rank, memories, zeros, torch.zeros(1, dtype=torch.int64),
                                   torch.zeros(1, dtype=torch.int64), patience, processors=8)  # fmt: skip

    def hurry(self, patience: float) -> None:
        self.workspace.patience = patience

    def nap(self) -> None:
        if self.sleep and self.random.random() < 0.3:
            time.sleep(self.random.random() * self.sleep)

    def run(
        self, kernel: Any, inputs: Sequence[Any], way: Any, calls: int, sleep: float, holds: Any
    ) -> list[list[Tensor]]:
        if hasattr(kernel, "bind"):
            kernel.bind(self.workspace)
        self.sleep = sleep
        self.held = {holds[1]: holds[2]} if holds and holds[0] == self.rank else {}
        results = []
        for call in range(calls):
            self.nap()
            prepared = kernel.prepare(shifted(inputs, call), way)
            for output in prepared.outputs:
                output.fill_(float("nan"))
            kernel.run(prepared)
            self.workspace.check()
            results.append(list(prepared.outputs))
        return results

    def add(self, times: int) -> None:
        from v41.lowering.cross_compile import load

        function = load(str(Path(__file__).with_name("kernels.py"))).count_up
        function[(times,)](self.workspace.memory[0])

    def serve(self) -> None:
        answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        while True:
            try:
                what, *arguments = receive(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer = getattr(self, what)(*arguments)
            except Exception as error:  # the test looks at it
                answer = Raised(type(error), error.where, error.facts) if isinstance(error, V41Error) else (
                    RuntimeError(traceback.format_exc()))  # fmt: skip
            send(answer, answers)


def twins(rank: Rank) -> None:
    """Gives the interpreter the PTX of the protocol, and takes from it what writes tensors back over shared memory."""
    import numpy as np
    import triton.language as tl
    from triton._C.libtriton import interpreter as native
    from triton.runtime import interpreter as it

    from v41.lowering.templates.all_reduce import protocol

    class Result:
        def __init__(self, data: Any, kind: Any) -> None:
            self.handle = it.TensorHandle(data, kind)

        def get_result(self, _: int) -> Any:
            return self.handle

    def inline(self: Any, text: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Result:
        rank.nap()
        if text == protocol.CLOCK:  # asked for by who waits: for others, which may share the processor
            time.sleep(0.001)
            return Result(np.full(values[0].data.shape, time.monotonic_ns(), np.int64), tl.int64)
        where = values[0].data
        if text == protocol.ACQUIRE:
            nothing = np.zeros(where.shape, np.int32)
            return Result(native.load(where, np.ones(where.shape, np.bool_), nothing, np.dtype(np.int32)), tl.int32)
        assert text in (protocol.PUT_32, protocol.PUT_64), text
        native.store(where, values[1].data, np.ones(where.shape, np.bool_))
        time.sleep(rank.held.get("put", 0.0))
        return Result(np.zeros(where.shape, np.int32), tl.int32)

    plain_atomic = it.InterpreterBuilder.create_atomic_rmw

    def atomic(self: Any, *arguments: Any) -> Any:
        result = plain_atomic(self, *arguments)
        time.sleep(rank.held.get("atomic", 0.0))
        return result

    it.InterpreterBuilder.create_inline_asm = inline
    it.InterpreterBuilder.create_atomic_rmw = atomic
    it.GridExecutor._restore_args_dev = lambda *_: None  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.lowering.ranks import Rank, twins  # as others import it, so that what is sent has one type

    torch.set_num_threads(1)
    repair()
    this = Rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    twins(this)
    this.serve()
