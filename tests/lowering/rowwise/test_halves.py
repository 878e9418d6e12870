"""The halves of an mHC boundary, as assign_streams cuts it: each becomes a kernel that holds to the contract."""

from __future__ import annotations

import pytest

from tests.lowering.rowwise.running import check_everywhere
from tests.passes.test_assign_streams import RUNGS, boundaries, by_kind
from tests.strategies.mhc import Stack
from tests.triton_interpreter import Interpreter
from v41.lowering.generated import GeneratedPiece, generate_piece
from v41.passes.assign_streams import assign_streams
from v41.passes.partition import partition
from v41.passes.pipeline import ALONG, CUT_AT
from v41.passes.side_work import HALVES
from v41.plan import Piece
from v41.regions import region_of, regions


@pytest.fixture(scope="module")
def halves() -> dict[str, Piece]:
    """Of a seam, by kind."""
    plan = partition(boundaries(Stack(sites=2, iters=2, width=16)), cut_at=CUT_AT, along=ALONG)
    made, _ = assign_streams(plan, RUNGS, by_kind)
    kinds = {region_of(call).kind: piece for piece in made.pieces for call in regions(piece.body)}
    return {kind: kinds[kind] for kind in HALVES}


@pytest.mark.parametrize("half", HALVES)
def test_a_half_becomes_a_kernel(halves: dict[str, Piece], half: str, interpreter: Interpreter) -> None:
    piece = halves[half]
    made = generate_piece(piece.body, half, piece.name)
    assert isinstance(made, GeneratedPiece), made
    results = check_everywhere(interpreter, piece.body, made.kernel)
    assert len(results) == len(piece.returns) == (2 if half == "mhc_critical" else 3)
