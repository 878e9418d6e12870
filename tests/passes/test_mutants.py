"""Every wrong version of a pass in mutants.py is noticed, and the right one is not."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

from tests.invariants import check_pass, copy_program
from tests.passes.mutants import MUTANTS, Mutant


def noticed(mutant: Mutant, program: GraphModule) -> bool:
    """Whether check_pass complains, the pass fails, or its decisions are not the wanted ones."""
    try:
        decisions = check_pass(mutant.run, program)
    except Exception:
        return True
    return not mutant.wanted(decisions)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    program = mutant.program()
    assert not noticed(mutant, copy_program(program))
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.wrong)
    assert noticed(mutant, program)
