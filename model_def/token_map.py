"""Engram's token map: which vocabulary ids are spellings of one text, numbered by first appearance.

Each id is decoded alone and its text brought to one form: NFKC, then NFD without accents, lower case, runs of blanks as
one space, ends stripped. A text that is one space stays so. A text that does not decode (U+FFFD) is known by its raw
token; one whose form is empty, by itself. Ids between others that no token has decode to the empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41.model_def.errors import FileUnreadable, TokenizerOfAnother, TokenizersMissing

LONE_SPACE = "\ue000"  # stands for it while ends are stripped: no text has a character of private use


def normal_form() -> Callable[[str], str]:
    """Text -> what spellings of one word have in common, by the library that training used."""
    from tokenizers import Regex, normalizers

    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
             normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), LONE_SPACE),
             normalizers.Strip(), normalizers.Replace(LONE_SPACE, " ")]  # fmt: skip
    made: Callable[[str], str] = normalizers.Sequence(steps).normalize_str
    return made


def token_key(text: str, raw: str, form: Callable[[str], str]) -> str:
    """What decides the compressed id of one token: `text` as it decodes alone, `raw` as the vocabulary spells it."""
    return raw if "\ufffd" in text else form(text) or text


def number_keys(keys: Iterable[str]) -> Tensor:
    """int64: the same number for the same key, counted up in order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def read_tokenizer(tokenizer_json: str | Path) -> Any:
    """The tokenizer of a file. FileUnreadable where `tokenizers` refuses it, TokenizersMissing without that package."""
    try:
        from tokenizers import Tokenizer  # here, for only this needs it
    except ImportError:
        raise TokenizersMissing(tokenizer_json) from None
    try:
        return Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the library raises this very type
        raise FileUnreadable(tokenizer_json, problem=f"no tokenizer: {error}") from None


def read_token_map(tokenizer_json: str | Path, ids: int, compressed: int) -> Tensor:
    """int64 [n], compressed id of each token id up to the highest.

    The hashes of a model with `ids` token ids hang on all its `compressed` ids being there: TokenizerOfAnother where a
    tokenizer has other ones. FileUnreadable where the file is none, TokenizersMissing as in read_tokenizer.
    """
    tokenizer = read_tokenizer(tokenizer_json)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)  # its size counts no gaps
    if highest >= ids:
        raise TokenizerOfAnother(tokenizer_json, problem=f"a token has id {highest}, and the model has {ids} ids")
    texts, form = tokenizer.decode_batch([[i] for i in range(highest + 1)], skip_special_tokens=False), normal_form()
    token_map = number_keys(token_key(text, tokenizer.id_to_token(i) or "", form) for i, text in enumerate(texts))
    different = int(token_map.max()) + 1 if highest >= 0 else 0
    if different != compressed:
        problem = f"its tokens have {different} different texts, and the model's tables count on {compressed}"
        raise TokenizerOfAnother(tokenizer_json, problem=problem)
    return token_map
