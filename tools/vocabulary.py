"""Vocabulary: text as token ids and back, by a checkpoint's tokenizer.json, or an id a byte where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from v41.model_def.config import V41Config
from v41.model_def.token_map import read_tokenizer
from v41.tools import bytes


@dataclass(frozen=True)
class Vocabulary:
    unit: str  # what an id stands for, many of them
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


BYTES = Vocabulary("bytes", bytes.encode, bytes.decode)


def vocabulary_of(config: V41Config, checkpoint: str | None) -> Vocabulary:
    """What the model's ids mean. With a tokenizer a text begins with the token that begins all texts."""
    file = None if checkpoint is None else Path(checkpoint) / "tokenizer.json"
    if file is None or not file.exists():
        return BYTES
    tokenizer = read_tokenizer(file)

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return [config.bos_token_id, *ids]

    return Vocabulary("tokens", encode, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
