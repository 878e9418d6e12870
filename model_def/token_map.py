"""Engram's token map: which vocabulary ids are spellings of one text, numbered by first appearance.

Each id is decoded alone and its text brought to one form: NFKC, then NFD without accents, lower case, runs of blanks as
one space, ends stripped. A text that is one space stays so. A text that does not decode (U+FFFD) is known by its raw
token; one whose form is empty, by itself.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41.model_def.errors import FileUnreadable

BLANKS = re.compile(r"[ \t\r\n]+")


def normal_form(text: str) -> str:
    """Equal for spellings of one word."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c.lower() for c in text if unicodedata.category(c) != "Mn")  # each by itself: no final sigma
    text = BLANKS.sub(" ", text)
    return text if text == " " else text.strip()


def token_key(text: str, raw: str) -> str:
    """What decides the compressed id of one token: `text` as it decodes alone, `raw` as the vocabulary spells it."""
    return raw if "\ufffd" in text else normal_form(text) or text


def number_keys(keys: Iterable[str]) -> Tensor:
    """int64: the same number for the same key, counted up in order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def read_tokenizer(tokenizer_json: str | Path) -> Any:
    """The tokenizer of a file, by the `tokenizers` package. FileUnreadable if it refuses, or is not there."""
    try:
        from tokenizers import Tokenizer  # here, for only this needs it
    except ImportError:
        raise FileUnreadable(tokenizer_json, problem="the package tokenizers is not installed") from None
    try:
        return Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the library raises this very type
        raise FileUnreadable(tokenizer_json, problem=f"no tokenizer: {error}") from None


def read_token_map(tokenizer_json: str | Path) -> Tensor:
    """int64 [vocabulary], compressed id of each token id. FileUnreadable where the file is no tokenizer."""
    tokenizer = read_tokenizer(tokenizer_json)
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    return number_keys(token_key(text, tokenizer.id_to_token(i) or "") for i, text in zip(ids, texts, strict=True))
