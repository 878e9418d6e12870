"""Number formats of V4.1: fp8 and fp4 groups, the three cache records, and stored weights, in plain PyTorch.

    e4m3 + UE8M0 a 32    activations of quantised linears; window record   [D e4m3 | D/32 scales]   528 B at D = 512
    e2m1 + E4M3 a 16     compressed entry, after RoPE: global record       [D/2 pairs | D/16 scales] 288 B at D = 512
    e2m1 + UE8M0 a 32    index query; index key record                     [D/2 pairs | D/32 scales]  68 B at D = 128

Inputs are bf16 values. A UE8M0 scale is 2^e, kept as the byte e + 127 and found from exponent bits; powers of two
divide exactly, and e2m1 codes come from comparing with midpoints, so no result hangs on how a device rounds a
division. Records and scales are uint8 (few CPU kernels take e8m0 or e2m1). All functions are row-local: [..., D] in,
and rows may hold anything. Of a group with NaN in it, e4m3 keeps the NaN in its channel and an E4M3 scale spreads it
over the group; e2m1 under UE8M0 has no code for it and makes next to nothing of the group, as the reference does. That
hides no NaN: index keys and queries only rank, and a row that holds one has it in its window key and in its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP, GROUP_FP4 = 32, 16  # channels under one UE8M0 scale; under one E4M3 scale
E4M3_MAX, E2M1_MAX = 448.0, 6.0
AMAX_FLOOR = 1e-4  # of e4m3 groups: an all-zero group still has a scale
E2M1_MIN_E4M3_SCALE, E2M1_MIN_UE8M0_SCALE = 2.0**-9, 2.0**-126  # smallest scale times 6 is the floor of amax
SATURATED_E4M3 = -E4M3_MAX, E4M3_MAX  # the cast alone makes NaN of 465 on some releases


def exponent_byte(x: Tensor) -> Tensor:
    """ceil(log2 x) + 127 of normal positive fp32 x, int32: the exponent field, one more if any mantissa bit is set."""
    bits = x.view(torch.int32)
    return (bits >> 23) + (bits & 0x7FFFFF).ne(0).to(torch.int32)


def power_of_two(byte: Tensor) -> Tensor:
    """2^(byte - 127) as fp32. Byte 0 is the denormal 2^-127."""
    return (byte.to(torch.int32) << 23).clamp(min=1 << 22).view(torch.float32)


def grouped(x: Tensor, group: int) -> Tensor:
    """[..., D] -> fp32 [..., D/group, group]."""
    return x.float().unflatten(-1, (-1, group))


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> e4m3 [..., D] and scale bytes [..., D/32]: the least power of two that keeps a group within 448."""
    g = grouped(x, GROUP)
    byte = exponent_byte(g.abs().amax(-1).clamp(min=AMAX_FLOOR) * (1 / E4M3_MAX))
    values = (g * power_of_two(254 - byte)[..., None]).clamp(*SATURATED_E4M3).to(torch.float8_e4m3fn)
    return values.flatten(-2), byte.to(torch.uint8)


def dequantize_fp8(values: Tensor, byte: Tensor) -> Tensor:
    """e4m3, or its bytes -> bf16 [..., D]; exact, for e4m3 has 4 significant bits."""
    values = values.view(torch.float8_e4m3fn)
    return (grouped(values, GROUP) * power_of_two(byte)[..., None]).flatten(-2).bfloat16()


def fake_quant_fp8(x: Tensor) -> Tensor:
    return dequantize_fp8(*quantize_fp8(x))


def encode_e2m1(x: Tensor, scale: Tensor) -> Tensor:
    """Codes 0..15 (int32) of x / scale on the grid 0 .5 1 1.5 2 3 4 6: nearest, ties to the even code, saturating.

    `m * scale` is exact, so comparing |x| with scaled midpoints rounds as the exact quotient would. NaN encodes as 0.
    """
    size, code = x.abs(), (x < 0).to(torch.int32) << 3
    for i, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        bound = midpoint * scale
        code = code + (size >= bound if i % 2 else size > bound).to(torch.int32)  # a tie goes up to an even code only
    return code


def decode_e2m1(code: Tensor) -> Tensor:
    """fp32 values of int32 codes 0..15."""
    size = code & 7
    halves = torch.where(size < 4, size, torch.where(size < 6, 2 * size - 4, 4 * size - 16))
    return torch.where(code < 8, halves, -halves).float() * 0.5


def pack_pairs(code: Tensor) -> Tensor:
    """Codes [..., D] -> uint8 [..., D/2], the even channel in the low nibble."""
    pairs = code.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def unpack_pairs(packed: Tensor) -> Tensor:
    """uint8 (or the int8 of a released file) [..., D/2] -> codes [..., D]."""
    byte = packed.to(torch.int32)
    return torch.stack((byte & 15, byte >> 4 & 15), -1).flatten(-2)


def quantize_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> pairs [..., D/2] and E4M3 scales as bytes [..., D/16]. There is no second scale above."""
    g = grouped(x, GROUP_FP4)
    amax = g.abs().amax(-1).clamp(min=E2M1_MAX * E2M1_MIN_E4M3_SCALE)
    scale = (amax * (1 / E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return pack_pairs(encode_e2m1(g, scale.float()[..., None]).flatten(-2)), scale.view(torch.uint8)


def dequantize_fp4(pairs: Tensor, scale: Tensor) -> Tensor:
    s = scale.view(torch.float8_e4m3fn).float()
    return (grouped(decode_e2m1(unpack_pairs(pairs)), GROUP_FP4) * s[..., None]).flatten(-2).bfloat16()


def fake_quant_fp4(x: Tensor) -> Tensor:
    return dequantize_fp4(*quantize_fp4(x))


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> pairs [..., D/2] and scale bytes [..., D/32]."""
    g = grouped(x, GROUP)
    amax = g.abs().amax(-1).clamp(min=E2M1_MAX * E2M1_MIN_UE8M0_SCALE)
    byte = exponent_byte(amax * (1 / E2M1_MAX))
    return pack_pairs(encode_e2m1(g, power_of_two(byte)[..., None]).flatten(-2)), byte.to(torch.uint8)


def dequantize_mxfp4(pairs: Tensor, byte: Tensor) -> Tensor:
    return (grouped(decode_e2m1(unpack_pairs(pairs)), GROUP) * power_of_two(byte)[..., None]).flatten(-2).bfloat16()


def fake_quant_mxfp4(x: Tensor) -> Tensor:
    return dequantize_mxfp4(*quantize_mxfp4(x))


@dataclass(frozen=True)
class Record:
    """How a cache holds one vector: the data bytes of all groups, then a scale byte for each."""

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor], Tensor]
    group: int  # channels under one scale
    data_bytes: int  # of one group

    def size(self, width: int) -> int:
        """Bytes of a vector of `width` channels."""
        return width // self.group * (self.data_bytes + 1)

    def encode(self, x: Tensor) -> Tensor:
        """bf16 [..., width] -> uint8 [..., size]."""
        data, scale = self.quantize(x)
        return torch.cat((data.view(torch.uint8), scale), -1)

    def decode(self, record: Tensor) -> Tensor:
        """uint8 [..., size] -> bf16 [..., width]; `decode(encode(x))` is the fake quantisation of x."""
        groups = record.shape[-1] // (self.data_bytes + 1)
        data, scale = record.split((groups * self.data_bytes, groups), -1)
        return self.dequantize(data, scale)


FP8_RECORD = Record(quantize_fp8, dequantize_fp8, GROUP, GROUP)  # window keys, after RoPE
FP4_RECORD = Record(quantize_fp4, dequantize_fp4, GROUP_FP4, GROUP_FP4 // 2)  # compressed entries, after RoPE
MXFP4_RECORD = Record(quantize_mxfp4, dequantize_mxfp4, GROUP, GROUP // 2)  # index keys, after RoPE


# Stored weights.


def dequantize_fp8_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [out, in] under one scale byte a 32 x 32 block, [ceil(out/32), ceil(in/32)] -> bf16."""
    rows, columns = weight.shape
    s = power_of_two(scale).repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    return (weight.float() * s).bfloat16()


def quantize_fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The other way, for random weights and tests: bf16 [out, in] -> e4m3 and scale bytes."""
    (rows, columns), pad = weight.shape, [-n % GROUP for n in weight.shape]
    blocks = torch.nn.functional.pad(weight.float(), (0, pad[1], 0, pad[0]))
    blocks = blocks.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [out/32, 32, in/32, 32]
    byte = exponent_byte(blocks.abs().amax((1, 3)).clamp(min=AMAX_FLOOR) * (1 / E4M3_MAX))
    values = (blocks * power_of_two(254 - byte)[:, None, :, None]).clamp(*SATURATED_E4M3).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), byte.to(torch.uint8)
