"""Chunk: which positions of a request run in a step, and which window keys their rows see: exactly, or by replay.

What a token leaves behind for good are its compressed entries and index keys. Window keys live in a ring of W and are
gone W tokens later; where they are missing, rows do without. This is the one place that says when (W is
`config.sliding_window`, p a row's position):

    exact           a row sees window keys max(0, p - W + 1) .. p in every layer. Rows of one prefill, of the same
                    tokens in chunks, and of decode steps are equal but for the order of sums.
    prefix hit      `hit` tokens were found in a prefix cache: their entries are in the slot, their window keys are
                    not. The W rows before `hit` run again. They write no entry and read those that are there; no row
                    sees a window key below hit - W, in any layer. Rows behind `hit` miss no key, yet they see keys of
                    replayed rows: an approximation, the same wherever chunks end.
    bounded replay  `config.swa_bounded_replay`: of a chunk longer than W the late layers are to run on its last W rows
                    alone, so no row sees a window key below end - W there. Late are the layers behind the last KV
                    source ("after_source", as in vLLM 0.33), or that layer too ("from_source", as in the report).
                    Entries are not affected. The result follows the chunks of each step; those of up to W rows, decode
                    steps among them, are exact.
    every logit     a request that returns prompt logprobs (`every_logit`) is exact: bounded replay leaves it whole,
                    and it cannot begin with a hit.

A hit and bounded replay together take the higher floor. Nothing is skipped here: the late layers run on all rows, whose
results nobody reads, and leaving them out is the compiler's work. `rows_kept` says which rows it must leave in: of a
chunk that is not its prompt's last (`following`) often none, for the next one makes again what would be read (`reach`).
Late rings of such a slot are then stale until the next chunk has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from v41.model_def.config import V41Config


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a request that lives in cache slot `slot`.

    ids: the request's tokens from its first one on. stop: None means all of them.
    hit: so many leading tokens were found in a prefix cache; every chunk of such a request says so.
    every_logit: logits of all rows instead of the last.
    following: so many rows the request's next chunk has, where nobody asks for logits of this one; that one asks for no
    more than the logits of its last row.
    """

    ids: Sequence[int]
    start: int
    slot: int
    stop: int | None = None
    hit: int = 0
    every_logit: bool = False
    following: int = 0

    @property
    def end(self) -> int:
        return len(self.ids) if self.stop is None else self.stop

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def logit_positions(self) -> range:
        if self.following:
            return range(self.end, self.end)
        return range(self.start if self.every_logit else max(self.end - 1, self.start), self.end)


def window_floors(config: V41Config, chunk: Chunk) -> tuple[int, int]:
    """The lowest window position that the chunk's rows see: in most layers, and in the late ones."""
    window = config.sliding_window
    floor = replay_start(config, chunk.hit)
    truncated = config.swa_bounded_replay != "off" and chunk.rows > window and not chunk.every_logit
    return floor, max(floor, chunk.end - window) if truncated else floor


def kept_last(config: V41Config) -> int:
    """So many last rows of a chunk are all that its last KV source and the layers behind that need of each other.

    With bounded replay one window, for below its floor no row sees a key. Without, each layer behind the source sees
    W - 1 rows further back than the one after it: W + n (W - 1) rows, 2,541 of 19 layers with W = 128.
    """
    window, behind = config.sliding_window, max(config.num_hidden_layers - 1 - config.last_kv_source, 0)
    return window if config.swa_bounded_replay != "off" else window + behind * (window - 1)


def inner_last(config: V41Config) -> int | None:
    """So many of them are all that the later half of these layers needs; None where that spares nothing."""
    window, behind = config.sliding_window, config.num_hidden_layers - 1 - config.last_kv_source
    return window + behind // 2 * (window - 1) if config.swa_bounded_replay == "off" and behind > 1 else None


def rows_kept(config: V41Config, chunk: Chunk, last: int) -> int:
    """How many rows of the chunk a batch keeps that keeps the last so many: all where the logits of all are returned,
    none where the next chunk sees nothing that the late layers leave."""
    if chunk.every_logit:
        return chunk.rows
    return 0 if chunk.following >= reach(config) else min(chunk.rows, last)


def reach(config: V41Config) -> int:
    """A next chunk of so many rows reads nothing that late layers, or the last KV source, left of the chunk before.

    What it leaves itself are the last W rows of each ring, and what that rests on: without bounded replay the exact
    halo. With it late layers see no key before its last W rows, if it has more than these; the source sees W - 1 more
    in front, unless it is a late layer too. Early layers read on: their rings, and all entries, are always written.
    """
    window = config.sliding_window
    if config.swa_bounded_replay == "off":
        return kept_last(config)
    return window + 1 if is_late(config, config.last_kv_source) else max(2 * window - 1, window + 1)


def replay_start(config: V41Config, hit: int) -> int:
    """The first position that runs again after a hit."""
    return max(hit - config.sliding_window, 0)


def is_late(config: V41Config, layer: int) -> bool:
    """Whether bounded replay truncates the layer."""
    first = config.last_kv_source + (config.swa_bounded_replay == "after_source")
    return config.swa_bounded_replay != "off" and layer >= first


def usable_hit(config: V41Config, known: int, prompt: int) -> int:
    """How much of `known` leading tokens a request of `prompt` tokens takes as its hit; 0 where that gains nothing.

    A hit ends between groups, leaves a row to run, and is longer than the window that would run again.
    """
    hit = min(known, prompt - 1)
    hit -= hit % max([1, *config.compress_ratios])
    return hit if hit > config.sliding_window else 0
