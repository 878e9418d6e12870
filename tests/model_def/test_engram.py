"""Engram: bit for bit on golden data, hashes against plain integers, and what a missing token does."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from tests.golden_data import Golden
from tests.model_def.exact import exact
from tests.model_def.released import filled
from v41.model_def import engram as engram_file
from v41.model_def.batch import build_batch
from v41.model_def.buckets import Buckets
from v41.model_def.cache import Cache
from v41.model_def.chunk import Chunk, replay_start
from v41.model_def.config import V41Config
from v41.model_def.engram import Engram
from v41.model_def.engram_constants import multipliers, table_primes
from v41.model_def.errors import TokenMapError
from v41.model_def.token_map import normal_form, number_keys, read_token_map, token_key

TINY = V41Config.preset("tiny")


def lookback(ids: list[int], orders: int) -> Tensor:
    """[T, orders]: each token, then those before it, -1 before the first."""
    return torch.tensor([[ids[t - s] if t >= s else -1 for s in range(orders)] for t in range(len(ids))])


def golden_engram(golden: Golden, layer: int) -> Engram:
    engram = filled(Engram(golden.config, layer), golden.weights, f"layers.{layer}.engram.")
    engram.set_token_map(golden.reference["engram.token_map"])
    return engram


@torch.no_grad()
def golden_streams(golden: Golden, layer: int, run: str = "prefill") -> tuple[Tensor, Tensor]:
    """What the layer read, and what our Engram makes of what the layer before left."""
    config, length = golden.config, int(golden.meta["prefill_tokens"])
    start, stop = (0, length) if run == "prefill" else (length + int(run[-1]), length + int(run[-1]) + 1)
    ids = golden("ids")[:stop]
    if layer == 0:
        X = golden.weights["embed.weight"][ids[start:]].unsqueeze(1).expand(-1, config.hc_mult, -1)
    else:
        X = golden(f"{run}.L{layer - 1}.x_out")
    recent = lookback(ids.tolist(), config.engram_max_ngram_size)[start:]
    with exact():
        ours = golden_engram(golden, layer)(X.view(-1, config.hc_mult, config.hidden_size), recent)
    return golden(f"{run}.L{layer}.x_in").view_as(ours), ours


@pytest.mark.parametrize("run", ["prefill", "decode0", "decode2"])
def test_golden_streams(golden: Golden, run: str) -> None:
    for layer in golden.config.engram_layer_ids:
        assert torch.equal(*golden_streams(golden, layer, run)), layer


def forgotten_offsets(primes: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * len(primes)


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("table_offsets", forgotten_offsets),
        ("multipliers", lambda layer, *rest: multipliers(layer + 1, *rest)),
        ("SMALLEST", 1e-2),
        ("inverse_rms", lambda x, eps: torch.ones_like(x[..., :1])),
    ],
)
def test_golden_streams_see(
    golden: Golden,
    what: str,
    instead: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engram_file, what, instead)
    assert not torch.equal(*golden_streams(golden, 1))


@given(st.lists(st.integers(0, TINY.vocab_size - 1), min_size=1, max_size=8), st.sampled_from(TINY.engram_layer_ids))
def test_rows_are_the_hashes_of_the_ngrams(ids: list[int], layer: int) -> None:
    rows = Engram(TINY, layer).rows(lookback(ids, 4))
    for t in range(len(ids)):
        assert rows[t].tolist() == hashed([ids[t - s] if t >= s else None for s in range(4)], layer)


def hashed(tokens: list[int | None], layer: int) -> list[int]:
    """The rows that a token, with those before it, looks up, in plain integers; None where there is none."""
    place, compressed = TINY.engram_layer_ids.index(layer), TINY.engram_compressed_vocab_size
    primes = table_primes(2, 6, TINY.engram_vocab_size)[place]
    mu, pad = multipliers(layer, 4, compressed), TINY.engram_pad_token_id
    c = [(pad if token is None else token) % compressed for token in tokens]
    expected = []
    for order in (2, 3, 4):
        h = 0
        for s in range(order):
            h ^= c[s] * mu[s]
        for head in range(2):
            table = (order - 2) * 2 + head
            expected.append(h % primes[table] + sum(primes[:table]))
    return expected


IMAGE = 9
WITH_IMAGES = TINY.replace(image_token_id=IMAGE)


@st.composite
def chunks_of_requests(draw: st.DrawFn) -> list[Chunk]:
    """Requests in the middle of being read: texts with images, chunks that begin anywhere, some behind a prefix hit."""
    ratio, made = max(TINY.compress_ratios), []
    for slot in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.sampled_from([IMAGE, *range(20)]), min_size=1, max_size=TINY.sliding_window + 12))
        hit = ratio * draw(st.integers(0, (len(ids) - 1) // ratio))
        start = draw(st.integers(replay_start(TINY, hit), len(ids) - 1))
        made.append(Chunk(ids, start, slot, draw(st.integers(start + 1, len(ids))), hit))
    return made


@given(chunks_of_requests(), st.booleans(), st.sampled_from(TINY.engram_layer_ids))
def test_rows_hang_on_real_tokens_across_chunks_and_hits(chunks: list[Chunk], padded: bool, layer: int) -> None:
    """What stood before a chunk counts, whoever read it; nothing behind an image, a first token or in a pad does."""
    cache = Cache.zeros(WITH_IMAGES, 3, TINY.sliding_window + 12)
    batch = build_batch(WITH_IMAGES, cache, chunks, buckets=Buckets() if padded else None)
    rows = Engram(WITH_IMAGES, layer).rows(batch.lookback).tolist()
    for chunk, first in zip(chunks, batch.host.bounds, strict=False):
        for row, p in enumerate(range(chunk.start, chunk.end), first):
            there = list(takewhile(lambda token: token != IMAGE, reversed(chunk.ids[max(p - 3, 0) : p + 1])))
            assert rows[row] == hashed([*there, *[None] * (4 - len(there))], layer)
    assert all(pad == hashed([None] * 4, layer) for pad in rows[batch.host.bounds[-1] :])


def test_released_hashes_stay_positive() -> None:
    """The largest id under the largest multiplier fits 63 bits, at released sizes too."""
    flash = V41Config()
    for layer in flash.engram_layer_ids:
        for mu in multipliers(layer, 4, flash.engram_compressed_vocab_size):
            assert (flash.engram_compressed_vocab_size - 1) * mu < 2**63


@torch.no_grad()
def test_behind_a_missing_token_all_are_missing() -> None:
    engram = Engram(TINY, 1)
    pad = TINY.engram_pad_token_id
    assert torch.equal(engram.rows(torch.tensor([[7, -1, 9, 11]])), engram.rows(torch.tensor([[7, pad, pad, pad]])))
    assert not torch.equal(engram.rows(torch.tensor([[7, 8, 9, 11]])), engram.rows(torch.tensor([[7, 8, 9, -1]])))


@torch.no_grad()
def test_a_token_that_is_none_takes_nothing_and_reaches_no_other() -> None:
    engram, X = Engram(TINY, 1), torch.randn(3, 4, TINY.hidden_size).bfloat16()
    recent = torch.tensor([[0, 6, 7, 8], [-1, 5, 6, 7], [9, 5, 6, 7]])  # id 0 is a token like any other
    spoiled = X.clone()
    spoiled[1] = torch.nan
    with exact():
        out, beside = engram(X, recent), engram(spoiled, recent)
        alone = engram(X[2:], recent[2:])
    assert torch.equal(out[1], X[1]) and not torch.equal(out[0], X[0])
    assert torch.equal(out[[0, 2]], beside[[0, 2]]) and torch.equal(out[2:], alone)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@torch.no_grad()
def test_traces_with_unbacked_rows_and_does_not_recompile(dtype: str) -> None:
    engram = Engram(TINY.replace(weight_dtype=dtype), 0).requires_grad_(False)
    compiled = torch.compile(engram, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 0, 1, 2, 33):
            X, recent = torch.randn(rows, 4, TINY.hidden_size).bfloat16(), torch.randint(-1, 512, (rows, 4))
            mark_unbacked(X, 0)
            mark_unbacked(recent, 0)
            assert torch.equal(compiled(X, recent), engram(X, recent))
    torch._dynamo.reset()


def test_a_token_map_must_fit() -> None:
    engram = Engram(TINY, 0)
    engram.set_token_map(torch.arange(100) % 7)
    assert engram.token_map[:100].tolist() == [i % 7 for i in range(100)]
    assert set(engram.token_map[100:].tolist()) == {TINY.engram_pad_token_id % 7}
    for wrong in (
        torch.arange(257),
        torch.zeros(513, dtype=torch.int64),
        torch.zeros(4, 4, dtype=torch.int64),
        torch.tensor([0, -1, 1]),
        torch.tensor([0, 1]),
    ):
        with pytest.raises(TokenMapError, match="below 256 for at most 512"):
            engram.set_token_map(wrong)
    padded_with_the_first = Engram(TINY.replace(engram_pad_token_id=0), 0)
    padded_with_the_first.set_token_map(torch.tensor([3]))
    assert set(padded_with_the_first.token_map.tolist()) == {3}


@pytest.fixture(scope="module")
def form() -> Callable[[str], str]:
    pytest.importorskip("tokenizers")
    return normal_form()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", "hello"),
        (" hello ", "hello"),
        ("ﬁÀÉ", "fiae"),
        ("\t\n a \r\n  b", "a b"),
        (" ", " "),
        ("\n\n", " "),
        ("", ""),
        ("ΑΣ", "ασ"),
        ("Ａ１", "a1"),
        ("\u0301", ""),
    ],
)
def test_normal_forms(form: Callable[[str], str], text: str, expected: str) -> None:
    assert form(text) == expected


def plain_form(text: str) -> str:
    """The same by Python's own tables. Letters are lowered each by itself: no final sigma."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c.lower() for c in text if unicodedata.category(c) != "Mn")
    text = re.sub("[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


words = st.text(st.sampled_from("aAàÀéß ﬁΣİ\t\n\r１ａ\u0301\u00a0\u3000가힣-"), max_size=6)


@given(words)
@settings(max_examples=300)
def test_normal_form_is_what_it_says(form: Callable[[str], str], text: str) -> None:
    assert form(text) == plain_form(text)


def test_ids_number_keys_by_first_appearance(form: Callable[[str], str]) -> None:
    first, second = ("\ufffd", "<0xE4>"), ("\ufffd", "<0xE5>")
    pairs = [("a", "a"), first, ("A ", "A "), ("\u0301", "x"), second, first]
    assert number_keys(token_key(*pair, form) for pair in pairs).tolist() == [0, 1, 0, 2, 3, 1]


def test_a_byte_of_a_letter_and_a_token_without_text_are_known_by_name(tmp_path: Path) -> None:
    """As a release has them: the first bytes of letters, which do not decode alone, and special tokens, which decode to
    nothing where they are skipped and are no part of the vocabulary but added to it."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"\u00c3": 0, "\u00c4": 1, "a": 2, "\u0120A": 3}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_token_map(tmp_path / "tokenizer.json", ids=6, compressed=5).tolist() == [0, 1, 2, 2, 3, 4]
