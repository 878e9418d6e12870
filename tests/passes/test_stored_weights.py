"""read_weight names the format that a decoding has, and takes what it does not know as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.invariants import apply
from tests.strategies.tracing import trace
from v41.model_def.quantization import dequantize_fp8_weight, dequantize_mxfp4, power_of_two
from v41.passes.canonicalize import canonicalize
from v41.passes.matching import aten
from v41.passes.stored_weights import read_weight


def by_bits(pairs: Tensor, scale: Tensor) -> Tensor:
    """MXFP4 decoded otherwise: sign, exponent and mantissa apart, groups of 16."""
    code = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).int()
    exponent, half, sign = code >> 1 & 3, code & 1, 1 - 2 * (code >> 3)
    size = torch.where(exponent == 0, half * 0.5, (1 + half * 0.5) * torch.exp2((exponent - 1).float()))
    groups = (sign * size).unflatten(-1, (-1, 16))
    return (groups * torch.exp2(scale.float() - 127).unsqueeze(-1)).flatten(-2).bfloat16()


def high_first(pairs: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp4(pairs >> 4 | pairs << 4, scale)


def scaled_twice(weight: Tensor, scale: Tensor) -> Tensor:
    return dequantize_fp8_weight(weight, scale + 1)


def by_row(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float() * power_of_two(scale)).bfloat16()


def in_fifths(weight: Tensor, scale: Tensor) -> Tensor:
    """No part of five is a part of ten blocks and their scales."""
    return (dequantize_fp8_weight(weight, scale).view(5, 64, 64) * 1.0).view(320, 64) * 1.0


def turned(pairs: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp4(pairs, scale).flip(0)


def added_up(pairs: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp4(pairs, scale).cumsum(1).bfloat16()


def below(pairs: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp4(pairs, scale.clamp(48, 255))


def above(pairs: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp4(pairs, scale.clamp(0, 208))


def but_one_byte(pairs: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp4(pairs ^ (pairs == 0x83), scale)


PAIRS, E4M3 = torch.zeros(6, 48, 32, dtype=torch.uint8), torch.zeros(96, 64).to(torch.float8_e4m3fn)
DECODINGS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, tuple[int, ...], str]] = {
    "mxfp4": (dequantize_mxfp4, PAIRS, (6, 48, 2), "mxfp4/32"),
    "mxfp4, by bits": (by_bits, PAIRS, (6, 48, 4), "mxfp4/16"),
    "the high nibble first": (high_first, PAIRS, (6, 48, 2), "bfloat16"),
    "fp8 blocks": (dequantize_fp8_weight, E4M3, (3, 2), "fp8/32x32"),
    "fp8 rows": (by_row, E4M3, (96, 1), "fp8/1x64"),
    "in parts of its own": (in_fifths, torch.zeros(320, 64).to(torch.float8_e4m3fn), (10, 2), "bfloat16"),
    "another expert's": (turned, PAIRS, (6, 48, 2), "bfloat16"),
    "outputs added up": (added_up, PAIRS, (6, 48, 2), "bfloat16"),
    "scales from a bound on": (below, PAIRS, (6, 48, 2), "bfloat16"),
    "scales up to a bound": (above, PAIRS, (6, 48, 2), "bfloat16"),
    "another byte": (but_one_byte, PAIRS, (6, 48, 2), "bfloat16"),
    "a power too much": (scaled_twice, E4M3, (3, 2), "bfloat16"),
}


@pytest.mark.parametrize("name", DECODINGS)
def test_a_format_is_told_by_what_the_decoding_computes(name: str) -> None:
    decode, values, sizes, wanted = DECODINGS[name]
    scales = torch.zeros(sizes, dtype=torch.uint8)
    gm = trace(lambda x, W, s: (x, decode(W, s).mT), torch.randn(3, 4), static=[values, scales])
    apply(canonicalize, gm)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    weight = read_weight(order, gm.graph.output_node().args[0][-1])
    assert weight.format == wanted
    assert len(weight.stored) == (1 if wanted == "bfloat16" else 2)


def test_a_weight_as_it_is() -> None:
    gm = trace(lambda x, W: x @ W.mT, torch.randn(3, 8), static=[torch.randn(4, 8)])
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    (product,) = [node for node in order if node.target is aten.mm.default]
    weight = read_weight(order, product.args[1])
    assert weight.format == "float32" and weight.values.op == "placeholder" and weight.scales is None
