"""The integers Engram hashes with: primes and offsets of its tables, and multipliers from a PCG64 stream.

All follow from a few config fields, so a checkpoint holds none of them. Plain Python on purpose: a model can be built,
and a config judged, where numpy is not installed.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, count, islice
from math import isqrt

MASK_32, MASK_64, MASK_128 = 2**32 - 1, 2**64 - 1, 2**128 - 1


@cache
def table_primes(layers: int, per_layer: int, at_least: int) -> tuple[tuple[int, ...], ...]:
    """Successive primes from `at_least` on, `per_layer` for each Engram layer: rows of its (order, head) tables."""
    primes = islice(filter(is_prime, count(max(2, at_least))), layers * per_layer)
    return tuple(tuple(islice(primes, per_layer)) for _ in range(layers))


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))


def table_offsets(primes: tuple[int, ...]) -> tuple[int, ...]:
    """First row of each table inside the layer's one embedding."""
    return (0, *accumulate(primes[:-1]))


def multipliers(layer: int, orders: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """One odd number a look-back slot: numpy's default_rng(10007 * layer).integers(0, high, orders), times 2 plus 1."""
    high = (2**63 - 1) // compressed_vocab_size // 2
    draw = PCG64(10007 * layer)
    return tuple(2 * bounded(draw, high) + 1 for _ in range(orders))


def bounded(draw: PCG64, high: int) -> int:
    """Below `high` without bias (Lemire): the top half of a 128-bit product, redrawn if its low half is too small."""
    threshold = 2**64 % high
    while True:
        product = next(draw) * high
        if product & MASK_64 >= threshold:
            return product >> 64


class PCG64:
    """PCG XSL-RR 128/64, seeded as numpy seeds its default generator. An iterator of 64-bit integers."""

    MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645

    def __init__(self, seed: int) -> None:
        words = seed_words(seed, 8)
        high = [words[i] | words[i + 1] << 32 for i in range(0, 8, 2)]  # 64-bit words, least significant half first
        self.increment = ((high[2] << 64 | high[3]) << 1 | 1) & MASK_128
        self.state = self.increment
        self.state = self._step(self.state + (high[0] << 64 | high[1]))

    def _step(self, state: int) -> int:
        return (state * self.MULTIPLIER + self.increment) & MASK_128

    def __next__(self) -> int:
        self.state = self._step(self.state)
        folded, turn = (self.state >> 64 ^ self.state) & MASK_64, self.state >> 122
        return (folded >> turn | folded << (-turn & 63)) & MASK_64


def seed_words(seed: int, n: int) -> list[int]:
    """`n` 32-bit words spread from a seed, as numpy's SeedSequence does with a pool of four."""
    entropy = [seed >> shift & MASK_32 for shift in range(0, max(32, seed.bit_length()), 32)]
    hash_constant = 0x43B0D7E5

    def scramble(value: int) -> int:
        nonlocal hash_constant
        value ^= hash_constant
        hash_constant = hash_constant * 0x931E8875 & MASK_32
        value = value * hash_constant & MASK_32
        return value ^ value >> 16

    def mix(x: int, y: int) -> int:
        mixed = (x * 0xCA01F9DD - y * 0x4973F715) & MASK_32
        return mixed ^ mixed >> 16

    pool = [scramble(entropy[i] if i < len(entropy) else 0) for i in range(4)]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mix(pool[target], scramble(pool[source]))
    for word in entropy[4:]:
        for target in range(4):
            pool[target] = mix(pool[target], scramble(word))
    return spread(pool, n)


def spread(pool: list[int], n: int) -> list[int]:
    """Output words of a seed sequence: the pool in turn, each under a running constant."""
    words, constant = [], 0x8B51F9DD
    for i in range(n):
        value = pool[i % 4] ^ constant
        constant = constant * 0x58F38DED & MASK_32
        value = value * constant & MASK_32
        words.append(value ^ value >> 16)
    return words
