"""expected: the regions that a step of a config consists of, beside those that the passes made.

regions_expected(config)            name -> how many, whatever the compiler found
regions_found(runs)                 the same of what the passes did; layers that share a body count each
differences(found, expected)        "moe_gate: 39 found, 40 by the config", a line a name; no line where all is well
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from v41.model_def.chunk import inner_last
from v41.model_def.config import V41Config
from v41.regions import REDUCED
from v41.report import PassRun
from v41.tools.tables import add, table


def regions_expected(config: V41Config, *, shared: bool = False) -> dict[str, int]:
    """Of every layer a gate, experts, attention with its output projection, and the norms of queries and window keys.

    A KV source norms its index keys; it pools its latents, or norms them where each token is an entry. A single
    iteration of Sinkhorn is no loop. Behind the last source rows are taken once; where there is none, in front of the
    last layer. Where ranks share the model, each sublayer's output is summed in front of what reads it.
    """
    sites, layers = config.boundary_sites(), config.num_hidden_layers
    sources = config.kv_source_layer_ids
    pooled = sum(config.compress_ratios[layer] > 1 for layer in sources)
    engrams = len(config.engram_layer_ids)
    expected = {
        "sinkhorn": sites.coefficient_sites * (config.hc_sinkhorn_iters > 1),
        "mhc_boundary entry": sites.entry,
        "mhc_boundary seam": sites.seams,
        "mhc_boundary after_engram": sites.after_engram,
        "mhc_post": sites.after_engram,
        "mhc_exit": sites.exit,
        "index_scores": len(config.index_source_layer_ids),
        **dict.fromkeys(("moe_gate", "experts", "attention", "output_projection"), layers),
        **dict.fromkeys(("engram_lookup", "engram_gate"), engrams),
        "compressor": pooled,
        "norm_quantise": 2 * layers + 2 * len(sources) - pooled,
        "kept_rows": 1 if inner_last(config) is None else 3,  # inner rows of all rows, and of kept ones
    }
    if shared:
        fused = {"seam": sites.seams, "post": sites.after_engram, "exit": sites.exit}
        expected |= {f"{REDUCED} {form}": count for form, count in fused.items()}
    return {name: count for name, count in expected.items() if count}


def regions_found(runs: Iterable[PassRun]) -> Counter[str]:
    return sum((Counter(run.made) for run in runs), Counter())


def differences(found: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    names = dict.fromkeys((*expected, *found))
    pairs = {name: (found.get(name, 0), expected.get(name, 0)) for name in names}
    return [f"{name}: {n} found, {wanted} by the config" for name, (n, wanted) in pairs.items() if n != wanted]


def regions_table(found: Mapping[str, int], expected: Mapping[str, int] | None) -> Table:
    """expected: None where no config says it."""
    made = table("region", "found", *["by the config"] * (expected is not None))
    for name in dict.fromkeys((*(expected or ()), *found)):
        add(made, name, found.get(name, 0), *([] if expected is None else [expected.get(name)]))
    return made


def regions_values(runs: Iterable[PassRun], by_config: Mapping[str, int] | None) -> dict[str, Any]:
    """The same facts for --json."""
    return {"found": dict(regions_found(runs)), "by_config": by_config}
