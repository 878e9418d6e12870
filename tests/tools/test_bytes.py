"""Bytes as tokens: any text comes back, and any tokens a model may say can be shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from v41.tools.bytes import VOCABULARY, decode, encode, packaged_prompts


@given(st.text())
def test_text_comes_back(text: str) -> None:
    assert decode(encode(text)) == text


@given(st.lists(st.integers(0, 600)))
def test_any_tokens_can_be_shown(ids: list[int]) -> None:
    shown = decode(ids)
    shown.encode()
    assert ("\ufffd" in shown) >= any(token >= VOCABULARY for token in ids)


def test_the_packaged_prompts_are_ragged_text() -> None:
    lengths = [len(encode(prompt)) for prompt in packaged_prompts()]
    assert len(lengths) >= 4 and min(lengths) > 0 and max(lengths) > 10 * min(lengths)


def test_an_argument_that_is_no_utf8_keeps_its_bytes() -> None:
    assert encode(b"a\xff".decode(errors="surrogateescape")) == [97, 255]
