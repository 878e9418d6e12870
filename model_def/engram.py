"""Engram: each token looks up what its last n-grams hash to, and every residual stream takes as much as its gate says.

    ids      c[t], c[t-1], ... compressed (spellings of one word share an id)
    rows     h = c[t] mu_0;  h <- h xor c[t-s] mu_s  for s = 1, 2, ...: the (s+1)-gram, modulo a prime a head
    lookup   orders x heads rows of e4m3, concatenated -> W_kv -> one key a stream, one value for all
    X_j  <-  X_j + sigmoid(signed_sqrt(<X_j / rms, q_j k_j key_j / rms> / sqrt(D))) * value

Rows hang on token ids alone: a look-up may run long before its layer. T tokens, S streams, D channels, N look-back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from v41.model_def.config import V41Config
from v41.model_def.constant import Constant
from v41.model_def.engram_constants import multipliers, table_offsets, table_primes
from v41.model_def.errors import TokenMapError
from v41.model_def.linear import into_streams, linear
from v41.model_def.norm import inverse_rms
from v41.model_def.quantization import GROUP, dequantize_fp8, quantize_fp8

SMALLEST = 1e-6  # under the root of the gate
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


class EngramTable(nn.Module):
    """All tables of a layer one under the other: `weight` e4m3 [rows, width], `scale` uint8 [rows, width/32].

    A checkpoint leaves them where its file is mapped: in the host's memory, whatever device the model is on.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(rows, width // GROUP, dtype=torch.uint8), requires_grad=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        values, scale = quantize_fp8(torch.randn(self.weight.shape, device=self.weight.device))
        self.weight.copy_(values)
        self.scale.copy_(scale)

    def forward(self, rows: Tensor) -> Tensor:  # int64 [T, n] -> bf16 [T, n, width]
        device, rows = rows.device, rows.to(self.weight.device)
        values = F.embedding(rows, self.weight.view(torch.uint8))  # bytes: few devices gather e4m3
        return dequantize_fp8(values.to(device), F.embedding(rows, self.scale).to(device))


class Engram(nn.Module):
    """`token_map` [vocab] int64 gives compressed ids. It follows from the tokenizer; without one, ids wrap around."""

    eps = Constant()

    def __init__(self, config: V41Config, layer: int) -> None:
        super().__init__()
        place = config.engram_layer_ids.index(layer)
        orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
        primes = table_primes(len(config.engram_layer_ids), orders * heads, config.engram_vocab_size)[place]
        streams, width = config.hc_mult, config.hidden_size
        self.eps, self.pad_token, self.streams = config.rms_norm_eps, config.engram_pad_token_id, streams
        self.compressed = config.engram_compressed_vocab_size
        self.multipliers = multipliers(layer, orders + 1, config.engram_compressed_vocab_size)
        self.embed = EngramTable(sum(primes), config.engram_head_dim)
        self.wkv = linear(config, config.engram_width, (streams + 1) * width, into_streams(config))
        self.q_weight = nn.Parameter(torch.ones(streams, width, dtype=torch.bfloat16))
        self.k_weight = nn.Parameter(torch.ones(streams, width, dtype=torch.bfloat16))
        for name, values in ("primes", primes), ("offsets", table_offsets(primes)):
            self.register_buffer(name, torch.tensor(values, device="cpu").view(orders, heads), persistent=False)
        ids = torch.arange(config.vocab_size, device="cpu") % config.engram_compressed_vocab_size
        self.register_buffer("token_map", ids, persistent=False)
        self.primes: Tensor
        self.offsets: Tensor
        self.token_map: Tensor

    def set_token_map(self, token_map: Tensor, where: str = "Engram.set_token_map") -> None:
        """Takes the tokenizer's map; ids beyond its end, which no text has, count as padding."""
        ids, shape, dtype = self.token_map.shape[0], tuple(token_map.shape), token_map.dtype
        counts = dtype in INTEGERS and token_map.numel() > 0
        lowest, highest = (int(token_map.min()), int(token_map.max())) if counts else (0, 0)
        fits = counts and len(shape) == 1 and self.pad_token < shape[0] <= ids
        if not fits or lowest < 0 or highest >= self.compressed:
            raise TokenMapError(where, shape=shape, dtype=dtype, lowest=lowest, highest=highest, ids=ids,
                                compressed=self.compressed)
        self.token_map.fill_(token_map[self.pad_token])
        self.token_map[: token_map.shape[0]] = token_map

    def forward(self, X: Tensor, lookback: Tensor) -> Tensor:
        """Streams [T, S, D] and token ids [T, N], this token first, -1 where there is none -> streams.

        A token that is -1 itself (an image's) takes nothing.
        """
        kv = self.wkv(self.embed(self.rows(lookback)).flatten(1)).unflatten(-1, (self.streams + 1, -1))
        key, value = kv.split((self.streams, 1), 1)  # [T, S, D], [T, 1, D]
        gate = torch.where(lookback[:, :1] >= 0, self.gate(X.float(), key.float()), 0.0)  # [T, S]
        return (X.float() + gate.unsqueeze(-1) * value.float()).to(X.dtype)

    def rows(self, lookback: Tensor) -> Tensor:
        """Table rows [T, orders * heads], order by order. Behind the first missing token all are missing."""
        there = (lookback >= 0).cumprod(1) > 0
        c = torch.where(there, self.token_map[lookback.clamp(min=0)], self.token_map[self.pad_token])
        h, hashes = c[:, 0] * self.multipliers[0], []
        for s, mu in enumerate(self.multipliers[1:], 1):
            h = h ^ c[:, s] * mu  # non-negative: ids and multipliers stay below 2^63 together
            hashes.append(h)
        return (torch.stack(hashes, 1).unsqueeze(-1) % self.primes + self.offsets).flatten(1)

    def gate(self, X: Tensor, key: Tensor) -> Tensor:
        """[T, S] from fp32 streams and keys [T, S, D]."""
        weight = self.q_weight.float() * self.k_weight.float()
        norms = inverse_rms(X, self.eps) * inverse_rms(key, self.eps)
        dot = (X * weight * key).sum(-1) * norms.squeeze(-1) * X.shape[-1] ** -0.5
        return torch.sigmoid(dot.sign() * dot.abs().clamp(min=SMALLEST).sqrt())
