"""gpu_text: the Triton that Inductor writes for a CUDA device, made where there is none.

Inductor asks a device for little before it writes: that it is there, its properties, whether Triton works. All of that
is answered for it; the text is taken where it would be compiled. Fake tensors stand on "cuda" meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.compile_fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor

from v41._compat import inductor_compile, inductor_settings
from v41.lowering.inductor import ANEW, SETTINGS, mark

HOPPER = {
    "type": "cuda", "index": 0, "cc": 90, "major": 9, "multi_processor_count": 132, "warp_size": 32,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
}  # fmt: skip


class Written(Exception):
    """Raised with the text in place of compiling it."""


def gpu_text(gm: torch.fx.GraphModule, inputs: list[Any]) -> str:
    """Inductor's module for `gm`, functional ATen over fake tensors on "cuda", under the settings of our pieces."""
    with hopper():
        try:
            inductor_compile(gm, inputs, {**inductor_settings(SETTINGS), **ANEW}, mark)
        except Exception as error:
            found = error
            while found is not None and not isinstance(found, Written):
                found = found.__cause__ or found.__context__  # type: ignore[assignment]
            if found is None:
                raise
            return str(found.args[0])
    raise AssertionError("Inductor compiled where it should have written")


def on_cuda(mode: fake_tensor.FakeTensorMode, *shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A fake tensor there."""
    with hopper(), mode:
        return torch.empty(shape, dtype=dtype, device="cuda:0")


def _raise_text(graph: Any) -> None:
    code, _ = graph.codegen()
    raise Written(getattr(code, "value", code))


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Under it torch takes one H200 for granted, as far as writing for it goes."""
    facts = {**HOPPER, "minor": 0, "name": "NVIDIA H200", "total_memory": 140 << 30, "L2_cache_size": 50 << 20}
    properties = SimpleNamespace(**facts)
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda device=0: properties),
        (torch.cuda, "get_device_capability", lambda device=0: (9, 0)),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
        (torch.cuda, "_exchange_device", lambda index: 0),
        (torch.cuda, "_maybe_exchange_device", lambda index: 0),
        (torch.cuda, "set_device", lambda device: None),
        (fake_tensor, "init_gpu_context", lambda device=None: None),
        (CudaInterface, "get_compute_capability", staticmethod(lambda device=0: 90)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "current_device", staticmethod(lambda: 0)),
        (CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda *args, **kwargs: None)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=0: properties)),
        (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        (DeviceProperties, "create", classmethod(lambda cls, device: cls(**HOPPER))),
        (GraphLowering, "compile_to_module", _raise_text),
        (torch.utils._triton, "triton_hash_with_backend", lambda: "none"),
    ]  # fmt: skip
    # Modules of Inductor hold this by name, and what it found of this machine before is remembered.
    answers += [(module, "has_triton", lambda: True) for name, module in sys.modules.items() if "_inductor" in name]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, answer))
        yield
