"""Programs on the rows of a ragged step, drawn as lists of steps: some keep rows apart, some read others, some mix all.

x [T, 8] of requests in chunks; x[logit_rows] is returned, and rings and a cache are written on the way
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from v41.passes.canonicalize import canonicalize

WIDTH, WINDOW, SLOTS, CAPACITY, EXPERTS, PICKS = 8, 3, 4, 48, 5, 2


class Step(NamedTuple):
    """The inputs with rows, in the order in which they are traced; all [T] but for what says otherwise."""

    x: Tensor  # [T, 8]
    positions: Tensor
    stops: Tensor
    slots: Tensor
    requests: Tensor
    columns: Tensor
    starts: Tensor
    late_floors: Tensor  # of windows in steps of FLOORED
    first_rows: Tensor  # [R]
    longest: Tensor  # [Q]
    logit_rows: Tensor  # [L]
    kept_rows: Tensor  # [K]
    kept_longest: Tensor  # [the most of them in one request]
    inner_rows: Tensor  # [I] of those
    inner_longest: Tensor
    weight: Tensor  # [8, 8]
    experts: Tensor  # [5, 8, 8]
    ring: Tensor  # [slots + 1, window, 8]
    tail: Tensor  # [slots + 1, 8]
    cache: Tensor  # [slots + 1, capacity, 8]


SIZES = (  # the first dimension of each input
    *("rows",) * 8, "requests", "longest", "logits", "last", "longest kept", "inner", "longest inner"
)  # fmt: skip
CACHES = Step._fields.index("ring")  # and those behind it are written


def step(
    chunks: list[tuple[int, int]], seed: int = 0, last_only: bool = True, last: int = 0, more: int = 0, inner: int = 0
) -> Step:
    """chunks: (first position, rows) of each request. Kept are the last so many of each, as many before each row of
    logits, and `more` that were not to be; inner ones likewise, among these."""
    generator = torch.Generator().manual_seed(seed)
    rows = [n for _, n in chunks]
    first = [sum(rows[:i]) for i in range(len(rows))]
    repeats, total = torch.tensor(rows), sum(rows)

    def per_row(values: list[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(repeats)

    columns = torch.arange(total) - per_row(first)
    ends = torch.tensor([f + n - 1 for f, n in zip(first, rows, strict=True)])
    logits = ends if last_only else torch.arange(total).flip(0)[: max(total // 2, 1)]

    def keeping(last: int, among: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.arange(total) >= (ends + 1 - last).repeat_interleave(repeats)
        for row in logits.tolist():
            kept[max(row - last + 1, 0) : row + 1] = True
        spare = (among & ~kept).nonzero().flatten()
        kept[spare[torch.randperm(len(spare), generator=generator)[:more]]] = True
        return kept, torch.arange(max(int(part.sum()) for part in kept.split(rows)))

    kept, longest = keeping(last, torch.tensor(True))
    few, longest_of_few = keeping(inner, kept)
    sizes = ((WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH), (SLOTS + 1, WINDOW, WIDTH), (SLOTS + 1, WIDTH))
    weights = [torch.randn(*size, generator=generator) for size in (*sizes, (SLOTS + 1, CAPACITY, WIDTH))]
    return Step(
        torch.randn(total, WIDTH, generator=generator),
        per_row([start for start, _ in chunks]) + columns,
        per_row([start + n for start, n in chunks]),
        per_row(list(range(len(chunks)))),
        per_row(list(range(len(chunks)))),
        columns,
        per_row([start for start, _ in chunks]),
        per_row([start + n - WINDOW if n > WINDOW else 0 for start, n in chunks]),
        torch.tensor(first),
        torch.arange(max(rows)),
        logits,
        kept.nonzero().flatten(),
        longest,
        few.nonzero().flatten(),
        longest_of_few,
        *weights,
    )


def window_rows(s: Step) -> Tensor:
    row = torch.arange(s.x.shape[0])
    return (row.unsqueeze(-1) - torch.arange(WINDOW - 1, -1, -1)).clamp(min=0)


def rows_before(x: Tensor, back: int) -> Tensor:
    """Which never lie behind the last row, either."""
    return (torch.arange(x.shape[0]) - back).clamp(min=0, max=x.shape[0] - 1)


def filled_for_all_rows(x: Tensor, s: Step) -> Tensor:
    """Early rows and late ones read a constant that says how many rows there are."""
    filled = torch.full((x.shape[0], 1), x.shape[0])
    write_cache(x * filled, s)
    return x + filled


def square_that_all_rows_need(x: Tensor, s: Step) -> Tensor:
    """Early rows have as many columns as there are rows, and late ones multiply them with a constant of as many."""
    y = x[:, :1].expand(-1, x.shape[0])
    write_cache(y.mean(1, keepdim=True) * x, s)
    return x + y @ torch.full((x.shape[0], WIDTH), 0.5)


def experts(x: Tensor, s: Step, grouped: bool) -> Tensor:
    """Two picks a row, sorted by expert and back."""
    picks = (x @ s.weight[:, :EXPERTS]).nan_to_num().topk(PICKS, -1).indices
    flat = picks.flatten()
    order = flat.argsort(stable=True)
    if grouped:
        ends = torch.searchsorted(flat[order], torch.arange(EXPERTS), right=True, out_int32=True)
        weights = s.experts.bfloat16()
        y = torch.nn.functional.grouped_mm(x.bfloat16()[order // PICKS], weights, offs=ends).float()
    else:
        y = x[order // PICKS] * s.experts[flat[order], 0]
    return y[order.argsort()].view(x.shape[0], PICKS, WIDTH).sum(1)


def grid_of(x: Tensor, s: Step) -> Tensor:
    return x[(s.first_rows.unsqueeze(-1) + s.longest).clamp(max=x.shape[0] - 1)]


def by_request(x: Tensor, s: Step) -> Tensor:
    return (grid_of(x, s).unflatten(-1, (2, 4)).relu().flatten(2) * s.weight[0])[s.requests, s.columns]


def floored_window(x: Tensor, s: Step, shift: int = 0, leak: bool = False, kept: bool = True) -> Tensor:
    """Each row sees its window down to its late floor; keys of earlier steps come from the ring."""
    back = torch.arange(WINDOW - 1, -1, -1)
    key = s.positions.unsqueeze(-1) - back
    behind = s.ring[s.slots.unsqueeze(-1), key % WINDOW]
    keys = torch.where((key >= s.starts.unsqueeze(-1)).unsqueeze(-1), x[window_rows(s)], behind)
    visible = s.positions.unsqueeze(-1) - (back + shift) >= s.late_floors.unsqueeze(-1)
    seen = torch.cat((keys * 2, behind), 1).masked_fill(~torch.cat((visible, key >= 0), 1).unsqueeze(-1), 0)
    if kept:
        write_ring(x, s)
    return seen.sum(1) + keys.amax(1) if leak else seen.sum(1)


def window_whose_large_numbers_are_seen(x: Tensor, s: Step) -> Tensor:
    """What lies below the late floor is seen, where it is above 50."""
    back = torch.arange(WINDOW - 1, -1, -1)
    key = s.positions.unsqueeze(-1) - back
    behind = s.ring[s.slots.unsqueeze(-1), key % WINDOW]
    keys = torch.where((key >= s.starts.unsqueeze(-1)).unsqueeze(-1), x[window_rows(s)], behind)
    visible = key >= s.late_floors.unsqueeze(-1)
    write_ring(x, s)
    return torch.where(visible.unsqueeze(-1), keys, keys.clamp(min=50)).sum(1)


def floored_channels(x: Tensor, s: Step) -> Tensor:
    """What is floored are as many channels as a window has keys, of all keys."""
    back = torch.arange(WINDOW - 1, -1, -1)
    key = s.positions.unsqueeze(-1) - back
    behind = s.ring[s.slots.unsqueeze(-1), key % WINDOW]
    of_channels = s.positions[:, None, None] - back
    y = torch.where((key >= s.starts.unsqueeze(-1)).unsqueeze(-1), x[window_rows(s)], behind)[..., :WINDOW]
    above = [of_channels >= floor[:, None, None] for floor in (s.starts, s.late_floors)]
    y = y.masked_fill(~above[0], 1).masked_fill(~above[1], 0)
    write_ring(x, s)
    return torch.cat((y.sum(1), x[:, WINDOW:]), 1)


def write_ring(x: Tensor, s: Step) -> Tensor:
    last = s.positions >= s.stops - WINDOW
    s.ring[torch.where(last, s.slots, SLOTS), s.positions % WINDOW] = x
    return x


def write_ring_otherwise(x: Tensor, s: Step) -> Tensor:
    s.ring[torch.where(s.stops > s.positions + WINDOW, SLOTS, s.slots), s.positions % WINDOW] = x * 2
    return x


def write_tail(x: Tensor, s: Step) -> Tensor:
    s.tail[torch.where(s.positions == s.stops - 1, s.slots, SLOTS)] = x
    return x


def write_cache(x: Tensor, s: Step) -> Tensor:
    s.cache[s.slots, s.positions] = x
    return x


Change = Callable[[Tensor, Step], Tensor]
LOCAL: dict[str, Change] = {
    "gelu": lambda x, s: torch.nn.functional.gelu(x),
    "norm": lambda x, s: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "softmax": lambda x, s: x.softmax(-1),
    "product": lambda x, s: x @ s.weight,
    "einsum in groups": lambda x, s: torch.einsum("tgd,grd->tgr", x.view(-1, 2, 4), s.experts[:2, :4, :4]).flatten(1),
    "transposed product": lambda x, s: (s.weight @ x.t()).t(),
    "heads": lambda x, s: torch.einsum("thd,tkd->thk", x.view(-1, 2, 4), x.view(-1, 2, 4)).flatten(1).repeat(1, 2),
    "halves": lambda x, s: torch.cat((x[:, 4:], x[:, :4]), 1),
    "sorted channels": lambda x, s: x.sort(-1).values,
    "best channels": lambda x, s: x.gather(-1, x.nan_to_num().topk(4).indices).repeat(1, 2),
    "channels turned around": lambda x, s: x.flip(-1),
    "cumulative": lambda x, s: x.cumsum(-1),
    "stacked": lambda x, s: torch.stack((x, x + 1), 1).sum(1),
    "position": lambda x, s: x * s.positions.unsqueeze(-1).cos(),
    "masked": lambda x, s: torch.where((s.positions == s.stops - 1).unsqueeze(-1), x, 0.5),
    "table": lambda x, s: x + s.cache[s.slots, s.positions],
    "a constant beside": lambda x, s: torch.cat((x[:, :4], torch.full((x.shape[0], 4), 0.5)), 1),
    "table by column": lambda x, s: x + s.cache[0, s.columns],
    "own row": lambda x, s: x + x[torch.arange(x.shape[0])],
    "experts": lambda x, s: experts(x, s, grouped=False),
    "grouped experts": lambda x, s: experts(x, s, grouped=True),
    "by request": by_request,
    "as many as rows": lambda x, s: x * x.shape[0] / (x.shape[0] + 3),
    "place of all": lambda x, s: x + (torch.arange(x.shape[0]) / x.shape[0]).unsqueeze(-1),
    "all but the last": lambda x, s: torch.where((torch.arange(x.shape[0]) < x.shape[0] - 1).unsqueeze(-1), x, 0.5),
    "as many as the longest": lambda x, s: x + s.longest.shape[0],
    "filled with how many": lambda x, s: x + torch.full((x.shape[0], 1), x.shape[0]),
}
READS_BEFORE: dict[str, Change] = {
    "window": lambda x, s: x[window_rows(s)].sum(1),
    "row before": lambda x, s: x - x[(torch.arange(x.shape[0]) - 1).clamp(min=0)],
    "row before, of those there are": lambda x, s: x - x[rows_before(x, 1)],
    "two rows before": lambda x, s: x + x.index_select(0, torch.relu(torch.arange(x.shape[0]) - 2)),
}
FLOORED: dict[str, Change] = {
    "window above a floor": floored_window,
    "another window above a floor": lambda x, s: floored_window(x, s, shift=1),
    "window seen below the floor": lambda x, s: floored_window(x, s, leak=True),
    "window seen below the floor where it is large": window_whose_large_numbers_are_seen,
    "channels above a floor": floored_channels,
    "window that no ring keeps": lambda x, s: floored_window(x, s, kept=False),
}
WRITES: dict[str, Change] = {
    "ring": write_ring, "ring otherwise": write_ring_otherwise, "tail": write_tail, "cache": write_cache,
}  # fmt: skip
MIXES: dict[str, Change] = {
    "sum of rows": lambda x, s: x - x.sum(0),
    "softmax of rows": lambda x, s: x.softmax(0),
    "rows so far": lambda x, s: x.cumsum(0),
    "sorted rows": lambda x, s: x.sort(0).values,
    "turned around": lambda x, s: x.flip(0),
    "first row": lambda x, s: x + x[0],
    "all pairs": lambda x, s: (x @ x.t()).softmax(-1) @ x,
    "row behind": lambda x, s: x + x[(torch.arange(x.shape[0]) + 1).clamp(max=x.shape[0] - 1)],
    "wrapped around": lambda x, s: x + x[torch.arange(x.shape[0]) - 1],
    "other order": lambda x, s: x + x[x[:, 0].nan_to_num().argsort()],
    "places": lambda x, s: x + x[:, 0].nan_to_num().argsort().argsort().unsqueeze(-1),
    "places of picks": lambda x, s: x + x[:, :2].nan_to_num().flatten().argsort().argsort().view(-1, 2)[:, :1],
    "by its number": lambda x, s: x + x[s.slots],
    "sorted by place": lambda x, s: sorted_by_place(x),
    "scattered": lambda x, s: torch.zeros_like(x).index_put((s.positions % x.shape[0],), x, accumulate=True),
}
SIZED: dict[str, Change] = {  # whose sizes say more than how many rows there are, so that others would be wrong
    "first of a table": lambda x, s: x + s.cache.view(-1, WIDTH)[: x.shape[0]],
    "first columns of a table": lambda x, s: x + s.cache.view(WIDTH, -1)[:, : x.shape[0]].t(),
    "product with the first of a table": lambda x, s: (
        x + torch.bmm(x.unsqueeze(1), s.cache.view(-1, WIDTH, WIDTH)[: x.shape[0]]).squeeze(1)
    ),
    "longest of a table": lambda x, s: (grid_of(x, s) + s.cache[0, : s.longest.shape[0]])[s.requests, s.columns],
    "filled for all rows, too": lambda x, s: filled_for_all_rows(x, s),
    "column for each row": lambda x, s: x + x[:, :1].expand(-1, x.shape[0]).sum(1, keepdim=True),
    "column for each row, of which all have one": lambda x, s: square_that_all_rows_need(x, s),
    "column of a square": lambda x, s: x + torch.full((x.shape[0],) * 2, 0.5).select(1, x.shape[0] - 1).unsqueeze(-1),
    "ones so far": lambda x, s: x + torch.full((x.shape[0], 1), 1.0).cumsum(0),
    "product for each row": lambda x, s: x + (x @ torch.full((WIDTH, x.shape[0]), 0.5)).sum(1, keepdim=True),
}
STEPS = SIZED | LOCAL | READS_BEFORE | FLOORED | WRITES | MIXES
Program = list[str]


def sorted_by_place(x: Tensor) -> Tensor:
    """What is added to a row is the place that the sort gave it."""
    order = x[:, 0].nan_to_num().argsort()
    y = x[order] + torch.arange(x.shape[0]).unsqueeze(-1)
    return y[order.argsort()]


def programs(*kinds: dict[str, Change]) -> st.SearchStrategy[Program]:
    names = [name for kind in kinds for name in sorted(kind)]
    return st.lists(st.sampled_from(names), min_size=1, max_size=6)


def build(program: Program, returned: bool = False) -> tuple[GraphModule, dict[str, Node]]:
    """The canonical graph of the steps one after another, which gives x[logit_rows], and its inputs by name.

    `returned`: gives all rows of x as well.
    """
    graph, inputs = Graph(), dict[str, Node]()
    for name, fake in zip(Step._fields, fakes(), strict=True):
        inputs[name] = graph.placeholder(name)
        inputs[name].meta["val"] = fake
    x = inputs["x"]
    for name in program:
        x = append(graph, captured(name), {**inputs, "x": x})
    logits = append(graph, captured("logits"), {**inputs, "x": x})
    graph.output((logits, x) if returned else (logits,))
    return GraphModule({}, graph), inputs


def append(graph: Graph, piece: GraphModule, given: dict[str, Node]) -> Node:
    """The result of `piece`, whose nodes are copied to the end of `graph`."""
    inputs = [node for node in piece.graph.nodes if node.op == "placeholder"]
    result = graph.graph_copy(piece.graph, dict(zip(inputs, (given[name] for name in Step._fields), strict=True)))
    assert isinstance(result, Node)
    return result


@cache
def fakes() -> tuple[Tensor, ...]:
    """The inputs with symbols for sizes, the same for all programs."""
    shapes, inputs = ShapeEnv(), step([(0, 2), (0, 3)])
    with shapes.ignore_fresh_unbacked_symbols():
        symbols = {name: shapes.create_unbacked_symint() for name in dict.fromkeys(SIZES)}
    for symbol in symbols.values():
        torch._check(symbol >= 2)
    with FakeTensorMode(shape_env=shapes):
        return tuple(
            torch.empty(symbols[SIZES[i]] if i < len(SIZES) else each.shape[0], *each.shape[1:], dtype=each.dtype)
            for i, each in enumerate(inputs)
        )


@cache
def captured(name: str) -> GraphModule:
    """The functional ATen graph of one step, traced once; quicker than through Dynamo, for there are many programs."""

    def run(*inputs: Tensor) -> Tensor:
        return STEPS[name](inputs[0], Step(*inputs)) if name != "logits" else inputs[0][Step(*inputs).logit_rows]

    functional = torch.func.functionalize(run, remove="mutations")

    def spelled_out(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t):  # type: ignore[no-untyped-def]  # make_fx takes no *args
        return functional(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t)

    gm = make_fx(spelled_out, decomposition_table=select_decomp_table(), tracing_mode="fake")(*fakes())
    canonicalize(gm)
    return gm
