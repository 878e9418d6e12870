"""Models of which one layer is not as the others, each in one way; all other layers run the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from v41.model_def.batch import Batch, mention_kept
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.mhc import boundary, coefficients, collapse, entry_streams, post
from v41.model_def.model import V41ForCausalLM
from v41.model_def.step import plan_step

Build = Callable[[], V41ForCausalLM]


class AnotherReader(V41ForCausalLM):
    """In front of the experts of layer `at`, the streams are read once more, and the head gets what was read."""

    def __init__(self, config: V41Config, at: int, read: Callable[..., Tensor]) -> None:
        super().__init__(config)
        self.at, self.read = at, read

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        mention_kept(batch)
        step = plan_step(batch, cache, self.config.sliding_window, self.window_freqs, self.compressed_freqs)
        X, A = entry_streams(self.embed(batch.tokens), self.config.hc_mult)
        y = B = C = selection = taken = None
        for number, layer in enumerate(self.layers):
            if layer.engram is not None:
                X, y = layer.engram(post(X, y, C, B), batch.lookback), None
            X, x, A, C, B = boundary(X, y, C, B, A, layer.attn_mix)
            y, selection = layer.attn(x, step, selection)
            mix = layer.ffn_mix
            if number == self.at:
                X = post(X, y, C, B)
                h = collapse(X, A)
                taken = self.read(X, A, h, mix.norm)
                x, (A, C, B) = mix.norm(h), coefficients(X, mix)
            else:
                X, x, A, C, B = boundary(X, y, C, B, A, mix)
            y = layer.ffn(x)
        assert taken is not None
        return self.head((self.norm(collapse(post(X, y, C, B), A)) + taken)[batch.logit_rows])


def plain(config: V41Config) -> Build:
    return lambda: V41ForCausalLM(config)


def with_numbers(config: V41Config, at: int, **numbers: float) -> Build:
    """Layer `at` computes its boundaries with other `numbers`, attributes of a Layer, than the config's."""

    def build() -> V41ForCausalLM:
        model = V41ForCausalLM(config)
        for name, value in numbers.items():
            assert hasattr(model.layers[at], name), name  # type: ignore[index]
            setattr(model.layers[at], name, value)  # type: ignore[index]
        return model

    return build


def with_another(config: V41Config, at: int, change: Callable[[Any], None]) -> Build:
    """Layer `at` after `change`, which edits it."""

    def build() -> V41ForCausalLM:
        model = V41ForCausalLM(config)
        change(model.layers[at])
        return model

    return build


def with_a_reader(config: V41Config, at: int) -> Build:
    """What the streams of layer `at` collapse to is read again: legal, and a further output of the region."""
    return lambda: AnotherReader(config, at, lambda X, A, h, norm: h)


def with_two_collapses(config: V41Config, at: int) -> Build:
    """The streams of layer `at` are collapsed and normed a second time, otherwise: no boundary any more."""
    return lambda: AnotherReader(config, at, lambda X, A, h, norm: norm(collapse(X, A.flip(-1))))
