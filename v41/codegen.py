"""codegen: the ways in which pieces may run on a device, by what the options ask and what the device can do.

eager       their ATen nodes one by one: all devices, and what everything else falls back to
inductor    compiled, where Inductor keeps the rounding points
triton      kernels generated from regions, where Triton compiles for the device; the rest by one of the two
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from v41._compat import outside_of_tracing
from v41.errors import CodegenHasNoDevice
from v41.options import Options

# ATen kernels whose decomposition rounds otherwise: they stay whole where eager's bits are promised, which is on a CPU
# and wherever pieces run their ATen nodes. Inductor calls eager's kernel for them.
WHOLE_IN_EAGER = frozenset(
    [
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "logsumexp",
        "silu",
        "gelu",
        "softplus",
        "mish",
        "elu",
        "hardswish",
        "log_sigmoid_forward",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit_no_training",
        "_fused_rms_norm",
        "linalg_vector_norm",
        "std",
        "std_mean",
        "lerp",
        "addcmul",
        "mv",
    ]
)


def ways(codegen: str, device: torch.device) -> tuple[str, ...]:
    """The ways in which a piece may run under an effective codegen, the first that takes it wins; eager takes all."""
    if codegen == "triton":
        return ("triton", "eager") if inductor_refusal(device) else ("triton", "inductor", "eager")
    return ("inductor", "eager") if codegen == "inductor" else ("eager",)


def inductor_refusal(device: torch.device) -> str | None:
    """Why Inductor does not keep the rounding points on `device`; None where it does."""
    from v41.lowering.inductor import supported

    with outside_of_tracing():
        return supported(device)


def effective_codegen(options: Options, device: torch.device) -> tuple[str, str]:
    """How pieces run, and who decided: the option, or for "auto" what the device can do.

    A CPU is where programs are checked, and "auto" waits for no C++ there. Elsewhere "triton" generates kernels
    for regions where Triton compiles for the device; all else runs through Inductor where that keeps the rounding
    points, else as eager.
    """
    from v41.lowering.generated import unsupported_device

    who = "auto" if options.codegen == "auto" else "options"
    if options.codegen == "eager":
        return "eager", who
    if options.codegen == "auto" and device.type == "cpu":
        return "eager", 'auto on a CPU: Inductor takes minutes to compile there; codegen="inductor" asks for it'
    no_kernels = unsupported_device(device)
    if options.codegen == "triton" and no_kernels:
        raise CodegenHasNoDevice(
            "torch.compile(options=...)", codegen="triton", reason=no_kernels, others="eager or inductor"
        )
    reason = inductor_refusal(device)
    if no_kernels is None and options.codegen != "inductor":
        return "triton", f"{who}; the rest as eager: {reason}" if reason else f"{who}; the rest through inductor"
    if options.codegen == "inductor":
        return "inductor", "options" if reason is None else f"options, although {reason}"
    return ("inductor", "auto") if reason is None else ("eager", f"auto: {reason}")


def kept_whole(order: Sequence[str]) -> frozenset[str]:
    """The ATen kernels that are not decomposed where pieces run in the ways `order`."""
    return frozenset() if "inductor" in order else WHOLE_IN_EAGER
