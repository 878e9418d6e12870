"""generate_piece: a piece whose rows are independent becomes one generated Triton kernel, or is refused with a reason.
A lone attention or indexer is the business of a template (templates/), so is a sum over ranks, all else of rowwise/.

    before   piece: rows of fp32 and bf16 in, regions, rows out        after   one launch; inputs checked at the border

The kernel's inputs are what the trace promised (dtype, shape, strides: piece_inputs.py), views included; outputs have
the strides that the trace gave them, since the pieces behind were compiled for those. What has another layout is
refused, not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, device, sym_max
from torch.fx import GraphModule, Node

from v41._compat import known_equal
from v41._compat_groups import ranks_of
from v41.lowering.piece_inputs import checker
from v41.lowering.rowwise import Kernel, Unsupported, generate
from v41.lowering.templates import all_reduce, attention, index_scores
from v41.regions import regions

DEVICES = ("cuda",)  # types that Triton compiles for here


@dataclass(frozen=True)
class GeneratedPiece:
    """What a piece runs: called with its inputs in order, it returns the outputs as a tuple. group: the name of the one
    over which it adds up, whose memory its kernel needs first (sums.py)."""

    kernel: Kernel
    check: Any
    group: str | None = None

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        self.check(args)
        return self.kernel.launch(*args)


def generate_piece(body: GraphModule, name: str, piece: str) -> GeneratedPiece | Unsupported:
    """The generated kernel of `body`, its text called `name` and a hash. `piece` names it where inputs do not fit."""
    template = next((each for each in (attention, index_scores) if any(regions(body, each.KIND))), None)
    group = all_reduce.group_of(body)
    if group is not None:
        found: Kernel | Unsupported = all_reduce.generate(body, ranks_of(group) or 0, name)
    else:
        found = generate(body, name) if template is None else template.generate(body, name)
    if isinstance(found, Unsupported):
        return found
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    (results,) = body.graph.output_node().args
    refusal = _lies_otherwise(results)  # type: ignore[arg-type]
    if refusal is not None:
        return refusal
    metas = [node.meta["val"] for node in placeholders]
    return GeneratedPiece(found, checker(piece, [node.name for node in placeholders], metas), group)


def unsupported_device(where: device) -> str | None:
    """None if generated kernels run on `where`, else the sentence that says why not."""
    if where.type not in DEVICES:
        return f"Triton compiles for {' and '.join(DEVICES)}, and this graph runs on {where.type}"
    return None


def _lies_otherwise(results: Sequence[Node]) -> Unsupported | None:
    """The first result that is not contiguous by its meta."""
    for node in results:
        value: Tensor = node.meta["val"]
        step: Any = 1
        for size, stride in reversed(list(zip(value.shape, value.stride(), strict=True))):
            if not known_equal(stride, step) and not known_equal(size, 1):
                return Unsupported(node.name, str(node.target), f"returns strides {tuple(value.stride())}")
            step = step * (size if isinstance(size, int) else sym_max(size, 1))
    return None
