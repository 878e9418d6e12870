"""index_check: what must hold of the results of generated indexers and selections, on this GPU.

picks against the model's from the same scores, scores against fp64, the same bits in any batch and any way, NaN rows,
contexts of a million.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from v41.lowering.templates.index_scores import Spread
from v41.lowering.templates.topk import TopK
from v41.model_def.indexer import ascending_picks, candidate_mask, entries_of
from v41.model_def.quantization import MXFP4_RECORD
from v41.tools.bench.index_cases import (
    BLOCK,
    HEADS,
    KEEP,
    ROLES,
    WIDTH,
    K,
    Step,
    decode,
    launch,
    prompt,
    scores_of,
)
from v41.tools.bench.rivals import error


@torch.no_grad()
def check() -> dict[str, Any]:
    """Every claim about results, as figures and booleans."""
    return {"selection": check_selection(), "decode": check_scores(decode(20, 8192, "cuda", 1)),
            "prompt": check_scores(prompt(90, 8192, 4, "cuda", 2)), "a million": check_long()}  # fmt: skip


def check_selection() -> dict[str, bool]:
    draw = torch.Generator("cuda").manual_seed(0)

    def rows_of(columns: int) -> Tensor:
        """A row each of: any, few values, close ones, zeros of both signs, NaN, -inf and both among others, few."""
        found = torch.randn(8, columns, generator=draw, device="cuda")
        some = torch.rand(8, columns, generator=draw, device="cuda")
        found[1] = found[1].round()
        found[2] = 1 + (some[2] * 3000).floor() * 2.0**-23
        found[3] = torch.where(some[3] < 0.5, 0.0, -0.0)
        found[4] = torch.nan
        found[5] = -torch.inf
        found[6] = torch.where(some[6] < 0.4, torch.nan, torch.where(some[6] < 0.8, -torch.inf, found[6]))
        found[7] = torch.where(some[7] < 100 / columns, found[7], -torch.inf)
        return found

    found = {}
    for k, columns in ((K, 1000), (K, 16_384), (K, 131_072), (K, 1 << 20), (KEEP, 65_536), (7, 5000)):
        scores = rows_of(columns)
        wanted, (ours,) = ascending_picks(scores, k), TopK.of(k).launch(scores)
        again = all(torch.equal(TopK.of(k).launch(scores)[0], ours) for _ in range(5))
        found[f"{k} of {columns}"] = torch.equal(ours, wanted) and again
    return found


def check_scores(step: Step) -> dict[str, Any]:
    """Scores against fp64, what is chosen against the model's choice from the same scores, and bits."""
    rows, seen = len(step.positions), step.positions + 1
    whole = {role: launch(role, step) for role in ROLES}
    mine = {role: each["scores"] for role, each in whole.items()}
    truth, (plain, _) = exactly(step), scores_of(*step.plain)
    shown = truth > -torch.inf
    ours, eager = (error(each[shown], truth[shown]) for each in (mine["source"], plain))
    kept = candidate_mask(mine["candidate_source"], seen, KEEP, BLOCK)[:, ::BLOCK]
    among = mine["source"].masked_fill(~step.mask, -torch.inf)
    agree = (whole["source"]["picks"] == ascending_picks(plain, K)).double().mean().item()
    dirty = replace(step, queries=step.queries.clone())
    bad = torch.arange(rows, device="cuda") % 3 == 1
    dirty.queries[bad] = torch.nan
    return {
        "errors": [ours, eager],
        "right": ours <= max(1.5 * eager, 2.0**-23) and torch.equal(mine["source"] > -torch.inf, shown),
        "picks as eager's": agree,
        "picks": all(
            torch.equal(whole[role]["picks"], ascending_picks(mine[role], K)) for role in ("source", "candidate_source")
        ),
        "blocks": torch.equal(whole["candidate_source"]["kept_blocks"], listed(kept)),
        "candidates alone": torch.equal(whole["re_indexer"]["picks"], ascending_picks(among, K)),
        "same bits in every batch": {
            str(n): all(same(launch(role, step.first(n)), whole[role], n) for role in ROLES) for n in (1, 3, 4, 17)
        },
        "same bits any way": all(same(launch(role, step, each), whole[role], rows)
                                 for role in ROLES for each in (Spread(1, 2, 64), Spread(1, 1, 128))),
        "the same every time": all(same(launch(role, step), whole[role], rows) for role in ROLES for _ in range(5)),
        "NaN rows harm no other": all(
            torch.equal(launch(role, dirty)["picks"][~bad], whole[role]["picks"][~bad]) for role in ROLES
        ),
        "NaN rows pick nothing": bool((launch("source", dirty)["picks"][bad] == -1).all()),
    }  # fmt: skip


def check_long() -> dict[str, bool]:
    step = decode(2, 1 << 20, "cuda", 3)
    step.positions[0] = 700
    whole = launch("candidate_source", step)
    kept = candidate_mask(whole["scores"], step.positions + 1, KEEP, BLOCK)[:, ::BLOCK]
    short = launch("source", replace(step.first(1), blocks=step.blocks[:100], lists=None))
    return {
        "picks": torch.equal(whole["picks"], ascending_picks(whole["scores"], K)),
        "blocks": torch.equal(whole["kept_blocks"], listed(kept)),
        "a short context in a long bucket": torch.equal(whole["picks"][:1], short["picks"]),
    }


def listed(kept: Tensor) -> Tensor:
    """Blocks kept, bool [T, B] -> their numbers [T, min(KEEP, B)], ascending, then -1."""
    beyond = kept.shape[1]
    number = torch.where(kept, torch.arange(beyond, device=kept.device), beyond).sort(1).values[:, :KEEP]
    return torch.where(number < beyond, number, -1)


def exactly(step: Step) -> Tensor:
    """Scores in fp64."""
    q, w, positions, requests, columns, rows, slots, blocks, cache = step.plain
    entries = entries_of(blocks, BLOCK)
    k = MXFP4_RECORD.decode(cache[slots[:, None], entries.clamp(max=cache.shape[1] - 1)]).double()
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    w = (w.float() * (WIDTH * HEADS) ** -0.5).double()[rows]
    for head in range(HEADS):
        x = torch.einsum("rqd,red->rqe", q[rows][:, :, head].double(), k).relu()
        total = total + x * w[:, :, head].unsqueeze(-1)
    return total[requests, columns].masked_fill(entries >= (positions + 1)[:, None], -torch.inf)


def same(part: dict[str, Tensor], whole: dict[str, Tensor], rows: int) -> bool:
    return all(torch.equal(part[name].view(torch.uint8), whole[name][:rows].view(torch.uint8)) for name in whole)
