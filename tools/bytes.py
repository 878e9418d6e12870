"""Text as token ids without a vocabulary file: an id per byte of its UTF-8, for any vocabulary of 256 or more.

    "Hi" -> [72, 105] -> "Hi"
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

VOCABULARY = 256


def encode(text: str) -> list[int]:
    return list(text.encode(errors="surrogateescape"))  # an argument's bytes, though they be no UTF-8


def decode(ids: Iterable[int]) -> str:
    """The text of `ids`. Ids past the last byte and bytes that form no character show as U+FFFD."""
    parts = (bytes([token]) if token < VOCABULARY else b"\xff" for token in ids)  # 0xff is in no UTF-8 text
    return b"".join(parts).decode(errors="replace")


def packaged_prompts() -> list[str]:
    """The texts that `v41 generate` reads when given none: one a line of prompts.txt, of very different lengths."""
    return files("v41.tools").joinpath("prompts.txt").read_text(encoding="utf-8").splitlines()
