"""short_sorts: integers along one axis are sorted by counting, where they are few.

    before   aten.sort.stable(keys)          after    v41::short_sort(keys) -> values, places

Routed experts sort the picks of a step by expert: some thousand keys at most. The library sorts 384 or 1,536 of them in
26 and 30 µs on an H200 (program-cut-memory-2026-11-30.json), most of which is waiting: of few keys every pair is
compared at once (short_sort_kernel.py). The operator sees how many there are when it runs, so one program serves all
sizes; more than MOST go to the library. Site: a tensor of integers of one axis. Exact: a stable sort has one result,
and a sort that may order ties in any way may order them so.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41.lowering.inverse_orders import SORTS

MOST = 4096
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BLOCK, CHUNK, WARPS = 16, 512, 4


def sort_on_gpu(keys: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """keys [n] -> sorted, and the place of each in `keys`, int64."""
    count = keys.shape[0]
    if not 0 < count <= MOST:
        return sort_by_library(keys, descending)
    values, places = torch.empty_like(keys), torch.empty(count, dtype=torch.int64, device=keys.device)
    from v41.lowering.short_sort_kernel import short_sort  # needs Triton, which a CPU may lack

    short_sort[(-(-count // BLOCK),)](keys, values, places, count, descending, BLOCK, CHUNK, num_warps=WARPS)
    return values, places


def sort_by_library(keys: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    values, places = keys.sort(stable=True, descending=descending)
    return values, places


def sort_of_fakes(keys: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int64)


torch.library.define("v41::short_sort", "(Tensor keys, bool descending) -> (Tensor, Tensor)")
torch.library.impl("v41::short_sort", "CUDA", sort_on_gpu)
torch.library.impl("v41::short_sort", "CPU", sort_by_library)
torch.library.register_fake("v41::short_sort", sort_of_fakes)


def short_sorts(gm: GraphModule, devices: Collection[str] = ("cuda",)) -> int:
    """Rewrites the sites of `gm`, functional ATen, that run on `devices`, in place. How many there were."""
    sites = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in SORTS]
    found = 0
    for sort in sites:
        asked = dict(zip(SORTS[sort.target], sort.args, strict=False)) | sort.kwargs
        if not fits(keys := asked["self"]) or keys.meta["val"].device.type not in devices:
            continue
        with gm.graph.inserting_before(sort):
            ours = gm.graph.call_function(
                torch.ops.v41.short_sort.default, (keys, bool(asked.get("descending", False)))
            )
        ours.meta = dict(sort.meta)
        sort.replace_all_uses_with(ours)
        gm.graph.erase_node(sort)
        found += 1
    if found:
        gm.recompile()
    return found


def fits(keys: Node) -> bool:
    """Whether a sort of `keys` is a site."""
    value = keys.meta["val"]
    return value.ndim == 1 and value.dtype in INTEGERS and known_equal(value.stride(0), 1)
