"""Small programs on a matrix per row [T, 4, 4], drawn as lists of steps, so that a failure shrinks to few of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

NO_OPS: dict[str, Callable[[Tensor], Tensor]] = {  # the same values; canonicalize should leave little of them
    "flatten and back": lambda x: x.flatten(1).unflatten(1, (4, 4)),
    "new axis and back": lambda x: x.unsqueeze(1).squeeze(1),
    "last axis and back": lambda x: x[..., None].view(x.shape),
    "transpose twice": lambda x: x.transpose(1, 2).mT,
    "permute around": lambda x: x.permute(0, 2, 1).permute(0, -1, -2),
    "all of it": lambda x: x[:, :, :],
    "expand to itself": lambda x: x.expand(-1, 4, 4),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "to its own type": lambda x: x.to(x.dtype),
    "detach": lambda x: x.detach(),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.mT,
    "contiguous transpose": lambda x: x.mT.contiguous(),
    "round to bf16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "to bf16": lambda x: x.to(torch.bfloat16),
    "to fp32": lambda x: x.float(),
    "square": lambda x: x.square(),
    "power": lambda x: x**2,
    "cube": lambda x: x.pow(3),
    "times itself": lambda x: x * x,
    "one more": lambda x: x + 1,
    "twice more": lambda x: torch.add(x, x, alpha=2),
    "from one": lambda x: 1 - x,
    "negated": lambda x: -x,
    "thirds": lambda x: x / 3,
    "row sums": lambda x: x - x.sum(-1, keepdim=True),
    "column sums": lambda x: x - x.sum(1).unsqueeze(1),
    "mean of the row": lambda x: x - x.mean((-1, -2), keepdim=True, dtype=torch.float32).to(x.dtype),
    "softmax": lambda x: x.softmax(-1),
    "swap halves": lambda x: torch.cat((x[:, 2:], x[:, :2]), 1),
    "product": lambda x: x @ x,
    "diagonal": lambda x: torch.einsum("tij,tjk->tki", x, x),
    "first of each": lambda x: x[:, :, :1].expand(-1, -1, 4),
    "tile": lambda x: x.select(1, -1).unsqueeze(-2).repeat(1, 4, 1),
    "in place": lambda x: x.clone().add_(1),
}
STEPS = NO_OPS | CHANGES

Program = list[tuple[str, bool]]  # name of a step, and whether its result is returned as well
programs = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), min_size=1, max_size=8)


def build(program: Program) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The function that takes the steps one after another and returns the last value, then those asked for."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        returned = []
        for name, kept in program:
            x = STEPS[name](x)
            returned += [x] * kept
        return x, *returned

    return run
