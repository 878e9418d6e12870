"""compile_for: a Triton kernel compiled for a GPU that need not be there, with its registers, spills and shared
memory.

    (facts,) = compile_for([Request("kernels/add.py", "add", {"x": "*bf16", "n": "i32"}, {"BLOCK": 1024}, "sm_90")])
    facts.registers, facts.spill_bytes, facts.shared_bytes, facts.ptx

Compilation runs in a process of its own, where TRITON_INTERPRET is not set: Triton reads that variable when a kernel
is decorated, so a process that interprets kernels can never compile one. Kernels come from files, since Triton reads
their source. Registers and spills come from the ptxas inside the Triton wheel. One call with many requests starts one
process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from v41.errors import KernelDoesNotCompile
from v41.gpu_facts import KNOWN


@dataclass(frozen=True)
class Request:
    """One kernel of one file, compiled once. Pointers count as 16-byte aligned, as torch's allocations are."""

    path: str
    kernel: str
    signature: Mapping[str, str]  # argument that is no constant -> Triton's name of its type: "*bf16", "i32", "fp32"
    constants: Mapping[str, Any]  # tl.constexpr argument -> int, float, bool, str or None
    arch: str  # a key of KNOWN
    divisible: Sequence[str] = ()  # integer arguments known to be multiples of 16
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages, ...


@dataclass(frozen=True)
class Facts:
    """What a GPU of `arch` would run."""

    arch: str
    registers: int  # a thread
    spill_bytes: int  # stores and loads, a thread
    shared_bytes: int  # a block
    warps: int
    ptx: str
    cubin_bytes: int  # of what ptxas makes of it, headers and tables included


def compile_for(requests: Sequence[Request]) -> list[Facts]:
    """Compiles all `requests` in one fresh process, in order. KernelDoesNotCompile names the first that fails."""
    for request in requests:
        if request.arch not in KNOWN:
            known = f"unknown; there are {', '.join(KNOWN)}"
            raise KernelDoesNotCompile(request.path, kernel=request.kernel, arch=request.arch, error=known)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as spare:
        if not _keeps(_cache_of_triton()):
            environment["TRITON_CACHE_DIR"] = spare
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps([asdict(request) for request in requests]),
            env=environment,
            capture_output=True,
            text=True,
        )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for request, answer in zip(requests, [*answers, {}], strict=False):
        if "ptx" not in answer:
            error = answer.get("error") or done.stderr.strip()
            raise KernelDoesNotCompile(request.path, kernel=request.kernel, arch=request.arch, error=error)
    return [Facts(**answer) for answer in answers]


def _cache_of_triton() -> Path:
    """Where Triton keeps what it compiles."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _keeps(folder: Path) -> bool:
    """Whether anything can be kept in `folder`, which need not be there yet. Triton refuses to compile where not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def load(path: str) -> Any:
    """The module in the file `path`. Triton needs the file: it reads the source of what it compiles or interprets."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(request: Request) -> Facts:
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    function = getattr(load(request.path), request.kernel)
    types = {name: request.signature.get(name, "constexpr") for name in function.arg_names}
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name in request.divisible]
    source = ASTSource(
        function,
        types,
        {(function.arg_names.index(name),): value for name, value in request.constants.items()},
        {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    major, minor = KNOWN[request.arch].capability
    capability = 10 * major + minor
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options=dict(request.options))
    wrong = short_products(kernel.asm["ttgir"])
    if wrong:
        raise ValueError(f"its result is wrong (Triton PR 11691), for it sums over too little: {wrong[0]}")
    registers, spills, size = _ptxas(kernel.asm["ptx"], capability)
    metadata = kernel.metadata
    return Facts(request.arch, registers, spills, metadata.shared, metadata.num_warps, kernel.asm["ptx"], size)


def short_products(ttgir: str) -> list[str]:
    """Products for `mma.sync` that sum over fewer numbers than the threads of a warp hold of an operand: what was made
    from bytes is held in runs of 4, so a sum of 16 reads half of each. Triton compiles them and says nothing."""
    operand = r"tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = ([01]), parent = #\w+, kWidth = (\d+)\}>>"
    found = []
    for line in ttgir.splitlines():
        for rows, columns, which, run in re.findall(operand, line) if "tt.dot " in line else ():
            if int(rows if which == "1" else columns) < 8 * int(run):  # 4 threads, and two runs of each
                found.append(line.strip())
                break
    return found


def _ptxas(ptx: str, capability: int) -> tuple[int, int, int]:
    """Registers and spilled bytes a thread as the assembler in Triton's wheel reports them, and bytes of its cubin."""
    from triton.backends.nvidia.compiler import get_ptxas  # type: ignore[import-untyped]

    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        tool = get_ptxas(capability).path
        made = file.with_suffix(".cubin")
        command = [tool, "-v", f"--gpu-name={target}", str(file), "-o", str(made)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        size = made.stat().st_size
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return int(registers), sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said))), size


def _main() -> None:
    for request in json.load(sys.stdin):
        try:
            answer = asdict(_compile(Request(**request)))
        except Exception as error:  # the parent raises it, with the kernel's name
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
        if "error" in answer:
            return


if __name__ == "__main__":
    _main()
