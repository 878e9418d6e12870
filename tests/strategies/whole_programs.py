"""Whole programs: sites of all kinds that the passes look for, one behind the other, near misses among them.

Each part is a site in a spelling of its own kind's strategy. What stands between two is what ties programs together:
views, casts, writes in place, a cache that is written and read, draws of random numbers, results with several users.
The first row input of a part depends on a result of the part before, so no two may change places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.compiler import nested_compile_region
from torch.func import functionalize
from torch.fx import GraphModule

from tests.strategies import attention, compressors, engrams, experts, gates, index_scores, mhc, norms
from tests.strategies import output_projections as projections
from tests.strategies.norms import trace_as_is
from tests.strategies.tracing import trace

SLOTS = 6
Inputs = tuple[Callable[..., Any], list[Tensor], list[Tensor]]  # a function, its rows, its weights


@dataclass(frozen=True)
class OtherMixture(experts.Mixture):
    """A near miss: its activation is another one."""

    def swiglu(self, gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        return super().swiglu(gate.tanh(), up, limit)


def inputs_of(site: Any) -> Inputs:
    """The function that a spelling stands for, and what it takes."""
    match site:
        case norms.Row() | compressors.Pooling():
            return site.run, *site.tensors()
        case engrams.Lookup():
            ids, *weights = site.tensors()
            return site.run, [ids], weights
        case engrams.Gate():
            *rows, q, k = site.tensors()
            return site.run, rows, [q, k]
        case experts.Mixture():
            return site.forward, site.rows(), site.weights()
        case attention.Spelling() | index_scores.Indexer():
            return site.to_trace()
    fn, row, weights = site.to_trace()
    return fn, [row], weights


@dataclass(frozen=True)
class Part:
    """site: a spelling of a strategy. found: the regions that become of it, by name; rule: what it breaks."""

    site: Any
    found: Counter[str]
    rule: str | None = None

    @property
    def sizes(self) -> Sequence[str]:
        return getattr(self.site, "all_sizes", ())


def part_of(kind: str, flaws: dict[str, str]) -> Callable[[Any], Part]:
    """For sites that become one region of `kind`, or none and break the rule of their flaw."""

    def made(site: Any) -> Part:
        return Part(site, Counter({} if site.flaw else {kind: 1}), flaws[site.flaw] if site.flaw else None)

    return made


def of_mixture(site: experts.Mixture) -> Part:
    missed = isinstance(site, OtherMixture)
    return Part(site, Counter({} if missed else {"experts": 1}), experts.ACTIVATES if missed else None)


def of_stack(site: mhc.Stack) -> Part:
    return Part(site, site.found())


NEARLY = {"the collapse": "the collapse is sum_j pre_j X_j", "the mix": "the post map is post_k y + sum_j comb_jk X_j"}


def nearly_stack(miss: str, what: str) -> Part:
    """One boundary that is right, and an exit that is nearly."""
    site = mhc.Stack(sites=1, flaw=(f"{miss} {what}", 1))
    return Part(site, site.found() - Counter({"mhc_exit": 1}), NEARLY[what])


quickest_stacks = st.builds(
    lambda count, iters, spelling: mhc.Stack(count=count, sites=1, iters=iters, spellings=(spelling,)),
    st.sampled_from([4, 2, 3]),
    st.integers(2, 3),
    mhc.spellings.map(lambda spelling: replace(spelling, subgraph=False)),
)
LEGAL: dict[str, st.SearchStrategy[Part]] = {
    "mhc": quickest_stacks.map(of_stack),
    "norm": norms.legal.map(part_of("norm_quantise", norms.FLAWS)),
    "compressor": compressors.legal.map(part_of("compressor", compressors.FLAWS)),
    "look-up": engrams.legal_lookups.map(part_of("engram_lookup", engrams.LOOKUP_FLAWS)),
    "engram gate": engrams.legal_gates.map(part_of("engram_gate", engrams.GATE_FLAWS)),
    "gate": gates.legal.map(part_of("moe_gate", gates.FLAWS)),
    "attention": attention.legal.map(part_of("attention", attention.FLAWS)),
    "index scores": index_scores.legal.map(part_of("index_scores", index_scores.FLAWS)),
    "experts": experts.legal.map(of_mixture),
    "projection": projections.legal.map(part_of("output_projection", projections.FLAWS)),
}
FLAWED: dict[str, st.SearchStrategy[Part]] = {
    "mhc": st.builds(nearly_stack, st.sampled_from(sorted(mhc.NEAR_MISSES)), st.sampled_from(sorted(NEARLY))),
    "norm": norms.flawed.map(part_of("norm_quantise", norms.FLAWS)),
    "compressor": compressors.flawed.map(part_of("compressor", compressors.FLAWS)),
    "look-up": engrams.flawed_lookups.map(part_of("engram_lookup", engrams.LOOKUP_FLAWS)),
    "engram gate": engrams.flawed_gates.map(part_of("engram_gate", engrams.GATE_FLAWS)),
    "gate": gates.flawed.map(part_of("moe_gate", gates.FLAWS)),
    "attention": attention.flawed.map(part_of("attention", attention.FLAWS)),
    "index scores": index_scores.flawed.map(part_of("index_scores", index_scores.FLAWS)),
    "experts": st.builds(OtherMixture).map(of_mixture),
    "projection": projections.flawed.map(part_of("output_projection", projections.FLAWS)),
}
# May lie in a subgraph: a boundary spans two, and of the others Dynamo traces no `mT` there.
INSIDE = (norms.Row, compressors.Pooling, engrams.Lookup, engrams.Gate, index_scores.Indexer)
OF_SYMBOLS = ("experts", "projection")  # found where rows are a symbol, and not a number among other numbers


# ---- what stands between two parts: given a result [T, n], a cache and where rows lie in it, a number for each row and
# what else is returned


def written_in_place(h: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
    """And the memory that was written is returned whole and in part."""
    copy = h.clone()
    copy[:, :1].add_(1).tanh_()
    return copy[:, :1], [copy, copy[:, :1]]


def through_the_cache(h: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
    cache[at] = h[:, :1].float()
    return cache[at].tanh(), []


TIES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, list[Tensor]]]] = {
    "a column": lambda h, cache, at: (h[:, :1].tanh(), []),
    "views": lambda h, cache, at: (h.unsqueeze(1).mT.flatten(1)[:, ::2][:, :1].tanh(), []),
    "rounded": lambda h, cache, at: (h[:, :1].bfloat16().float().tanh(), []),
    "all channels": lambda h, cache, at: (h.float().mean(-1, keepdim=True).tanh(), []),
    "several users": lambda h, cache, at: ((s := h[:, :1].tanh()) * s, [s]),
    "random numbers": lambda h, cache, at: (torch.rand_like(h[:, :1].float()) * h[:, :1].tanh(), []),
    "a draw": lambda h, cache, at: (mhc.drawn_like(h[:, :1].float()) + h[:, :1].tanh(), []),
    "in place": written_in_place,
    "a cache": through_the_cache,
}


@dataclass(frozen=True)
class Program:
    """ties: what stands behind each part. returned: whether its results are returned as well.

    inside: whether it is a subgraph of its own, which the model asked for; only Dynamo keeps these.
    """

    parts: tuple[Part, ...]
    ties: tuple[str, ...]
    returned: tuple[bool, ...]
    inside: tuple[bool, ...]

    def to_trace(self) -> Inputs:
        """The function, its rows, its weights. A cache and the rows' places in it come first."""
        made = [inputs_of(part.site) for part in self.parts]
        pairs = zip(made, self.inside, strict=True)
        functions = [as_subgraph(fn) if inside else fn for (fn, *_), inside in pairs]
        rows, weights = [torch.arange(5) % SLOTS], [torch.zeros(SLOTS, 1)]
        rows += [row.clone() for _, own, _ in made for row in own]  # of memory of their own, as a subgraph asks for
        weights += [weight.clone() for _, _, own in made for weight in own]

        def run(*given: Tensor) -> list[Tensor]:
            (at, *moving), (cache, *still) = given[: len(rows)], given[len(rows) :]
            results: list[Tensor] = []
            number = None
            for fn, (_, own, held), tie, returned in zip(functions, made, self.ties, self.returned, strict=True):
                taken, moving = moving[: len(own)], moving[len(own) :]
                kept, still = still[: len(held)], still[len(held) :]
                if number is not None and not any(row.is_floating_point() for row in taken):
                    results.append(number)  # nothing to tie it to
                found = tensors(fn(*tied(taken, number), *kept))
                number, more = TIES[tie](first_float(found), cache, at)
                results += [*more, *(found if returned or len(found) > 1 else [])]
            return [*results, number] if number is not None else results

        return run, rows, weights

    @property
    def sizes(self) -> list[str]:
        counts = [len(inputs_of(part.site)[1]) for part in self.parts]
        own = [part.sizes or ["rows"] * count for part, count in zip(self.parts, counts, strict=True)]
        return ["rows", *(size for sizes in own for size in sizes)]

    @property
    def symbolic(self) -> bool:
        return any(isinstance(part.site, (experts.Mixture, projections.Projection)) for part in self.parts)

    def traced(self) -> GraphModule:
        """With as many rows as come where a kind asks for that, else with five, which is quick."""
        torch.manual_seed(0)
        fn, rows, weights = self.to_trace()
        if self.symbolic:
            return trace(fn, *rows, static=weights, sizes=self.sizes)
        return trace_as_is(functionalize(fn, remove="mutations"), [*rows, *weights])


def as_subgraph(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Tensor) -> Any:
        return fn(*args)

    return nested_compile_region(run)  # type: ignore[no-any-return]


def tensors(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def first_float(results: Sequence[Tensor]) -> Tensor:
    """[T, n] the first result that has floats, flat; of integers alone, the first."""
    found = next((each for each in results if each.dtype in (torch.float32, torch.bfloat16)), results[0].float())
    return found.flatten(1) if found.ndim > 1 else found.unsqueeze(1)


def tied(rows: list[Tensor], number: Tensor | None) -> list[Tensor]:
    """`rows`, the first of them that has floats with `number` of its row added."""
    at = next((i for i, row in enumerate(rows) if row.is_floating_point()), None)
    if number is None or at is None:
        return rows
    row = rows[at]
    return [*rows[:at], row + number.to(row.dtype).reshape(-1, *[1] * (row.ndim - 1)), *rows[at + 1 :]]


@st.composite
def whole_programs(draw: st.DrawFn, kinds: Sequence[str] = tuple(LEGAL), longest: int = 3) -> Program:
    """Two to `longest` parts of different kinds, one in four a near miss."""
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=longest, unique=True))
    parts = tuple(draw((FLAWED if draw(st.integers(0, 3)) == 0 else LEGAL)[kind]) for kind in drawn)
    ties = tuple(draw(st.sampled_from(sorted(TIES))) for _ in parts)
    program = Program(parts, ties, tuple(draw(st.booleans()) for _ in parts), (False,) * len(parts))
    if not program.symbolic:
        return program
    return replace(program, inside=tuple(isinstance(p.site, INSIDE) and draw(st.booleans()) for p in parts))
