"""Sums over ranks as torch.compile wires them: the option, one vote a group, a stall, the cache, what falls back.

One process stands for two ranks whose numbers are alike; kernels run their bodies' nodes, and the memory is pretended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch.fx import GraphModule

import v41
from tests.strategies.ranks import ranks
from tests.strategies.reduced import Norms, Sum
from v41 import backend, sums
from v41.channels import PEER, SITE, Workspace
from v41.errors import InvalidOptionValue, NotSymmetric, PeerStalled
from v41.lowering.templates import all_reduce
from v41.lowering.templates.all_reduce import SummingKernel
from v41.regions import REDUCED
from v41.report import CompileReport
from v41.runtime import symmetric
from v41.runtime.executor import Artifact, eager_artifact

PROGRAM = Norms((Sum(), Sum()))
BORDER = f"region {REDUCED}"


@dataclass
class Machine:
    """What stands in for GPUs that reach each other. `unable`, `wrong`: what a vote or a trial says."""

    unable: str | None = None
    wrong: str | None = None
    stalls: bool = False  # the next launch waits in vain
    made: list[Workspace] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    launched: list[tuple[str, Workspace | None]] = field(default_factory=list)
    bodies: dict[str, Artifact] = field(default_factory=dict)

    def workspace(self, group: Any, device: torch.device) -> Workspace:
        if self.unable is not None:
            self.tried.append("vote")
            raise NotSymmetric("rank 0 of 2", reason=self.unable)
        empty, record = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        self.made.append(Workspace(0, (empty, empty), empty, record, record.clone(), 1.0, 8))
        return self.made[-1]

    def trusted(self, found: Workspace, group: Any, name: str, trial: Callable[..., Any]) -> None:
        self.tried.append(name)
        if self.wrong is not None:
            raise NotSymmetric("rank 0 of 2", reason=self.wrong)

    def generate(self, body: GraphModule, count: int, name: str = "sum") -> Any:
        made = GENERATE(body, count, name)
        assert isinstance(made, SummingKernel) and made.ranks == 2
        self.bodies[made.name] = eager_artifact(body)
        return made

    def launch(self, kernel: SummingKernel, *given: Any) -> tuple[Any, ...]:
        self.launched.append((kernel.name, kernel.workspace))
        if self.stalls:
            assert kernel.workspace is not None
            told = (kernel.workspace.site(kernel.name) + 1) << SITE | 1 << PEER | 7
            kernel.workspace.record.fill_(told)
            kernel.workspace.failed.fill_(told)
        return self.bodies[kernel.name](*given)


GENERATE = all_reduce.generate


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two ranks, this process the first, whose device takes generated kernels."""
    made = Machine()
    codegen = {"auto": "triton", "eager": "eager"}
    ways = {"triton": ("triton", "eager"), "eager": ("eager",)}
    monkeypatch.setattr(backend, "effective_codegen", lambda options, device: (codegen[options.codegen], "test"))
    monkeypatch.setattr(backend, "ways", lambda codegen, device: ways[codegen])
    monkeypatch.setattr(backend, "check_same_program", lambda plan, artifacts: None)
    monkeypatch.setattr(symmetric, "workspace", made.workspace)
    monkeypatch.setattr(symmetric, "trusted", made.trusted)
    monkeypatch.setattr(all_reduce, "generate", made.generate)
    monkeypatch.setattr(SummingKernel, "launch", lambda kernel, *given: made.launch(kernel, *given))
    with ranks(2), torch.no_grad():
        torch.compiler.reset()
        yield made


def step(**options: Any) -> tuple[list[Tensor], CompileReport, Callable[..., Any]]:
    """What a freshly compiled program returns, its report, and a call that runs it again."""
    torch.compiler.reset()
    given = PROGRAM.tensors()
    mark_unbacked(given[0], 0)
    compiled = torch.compile(lambda *args: PROGRAM.run(*args), backend="v41", options=options)
    with v41.collect() as reports:
        results = compiled(*given)
    return results, reports[0], lambda: compiled(*given)


def check_results(results: list[Tensor]) -> None:
    for ours, theirs in zip(results, PROGRAM.run(*PROGRAM.tensors()), strict=True):
        assert torch.equal(ours, theirs)


def borders(report: CompileReport) -> int:
    """How many pieces hold a sum with what reads it."""
    assert report.plan is not None
    return sum(piece.border == BORDER for piece in report.plan.pieces)


def test_the_option_gives_sums_to_kernels_with_the_memory_of_their_group(machine: Machine) -> None:
    results, report, again = step(all_reduce="fused", cache=False)
    check_results(results)
    assert report.options["all-reduce"] == ("2 in kernels", "options") and not report.fallbacks
    assert borders(report) == 2 and sum(map(len, report.kernels.values())) == 2
    check_results(again())
    (made,) = machine.made
    assert len(machine.launched) == 4 and all(memory is made for _, memory in machine.launched)


def test_a_group_votes_once(machine: Machine) -> None:
    for _ in range(2):
        check_results(step(all_reduce="fused", cache=False)[0])
    assert len(machine.made) == 1 and machine.tried == [sums.TRIAL]
    assert {id(memory) for _, memory in machine.launched} == {id(machine.made[0])}


def test_a_rank_that_waits_in_vain_is_an_error_of_the_step(machine: Machine) -> None:
    _, _, again = step(all_reduce="fused", cache=False)
    machine.stalls = True
    with pytest.raises(PeerStalled, match=r"rank 0 waited .* for rank 1, in call 7"):
        again()
    machine.stalls = False
    with pytest.raises(PeerStalled):  # nor is any later result to be trusted
        again()


@pytest.mark.parametrize("why", ["unable", "wrong"])
def test_without_shared_memory_collectives_stay_and_the_report_says_why(machine: Machine, why: str) -> None:
    setattr(machine, why, "rank 1: its device is cpu")
    for _ in range(2):
        results, report, _ = step(all_reduce="fused", cache=False)
        check_results(results)
        how, who = report.options["all-reduce"]
        assert how == "2 as they are, each in front of what reads the sum"
        assert who == "options: rank 1: its device is cpu"
        assert borders(report) == 0 and not machine.launched
    assert len(machine.tried) == 1, "a vote is held once, whatever it says"


def test_kernels_add_up_unasked_where_all_ranks_can(machine: Machine) -> None:
    results, report, _ = step(cache=False)
    check_results(results)
    assert report.options["all-reduce"] == ("2 in kernels", "auto") and machine.launched


@pytest.mark.parametrize(
    "options", [{"codegen": "eager"}, {"all_reduce": "library"}, {"all_reduce": "fused", "codegen": "eager"}]
)
def test_nobody_votes_where_nothing_comes_of_it(machine: Machine, options: dict[str, Any]) -> None:
    results, report, _ = step(cache=False, **options)
    check_results(results)
    assert borders(report) == 0 and not machine.made and not machine.tried and not machine.launched
    how, who = report.options["all-reduce"]
    assert str(how).startswith("2 as they are")
    none = "no kernel adds up over ranks with codegen eager"
    told = {"auto": f"auto: {none}", "library": "options", "fused": f"options: {none}"}
    assert who == told[options.get("all_reduce", "auto")]


def test_a_program_without_sums_asks_nobody(machine: Machine) -> None:
    with v41.collect() as reports:
        compiled = torch.compile(lambda x: x * 2, backend="v41", options={"all_reduce": "fused", "cache": False})
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert "all-reduce" not in reports[0].options and not machine.made


def test_a_cached_program_gets_the_memory_that_is_there(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("V41_CACHE_DIR", str(tmp_path))
    _, report, _ = step(all_reduce="fused")
    assert report.cache.endswith("; stored"), report.cache
    sums._KNOWN.clear()  # as in another process
    machine.launched.clear()
    results, report, _ = step(all_reduce="fused")
    check_results(results)
    assert report.cache.startswith("hit"), report.cache
    assert report.options["all-reduce"] == ("2 in kernels", "options")
    assert [memory for _, memory in machine.launched] == [machine.made[1]] * 2
    sums._KNOWN.clear()
    machine.launched.clear()
    machine.unable = "rank 1: its device is cpu"  # and where there is none, what was stored for some is not taken
    results, report, _ = step(all_reduce="fused")
    check_results(results)
    assert report.cache.startswith("miss: nearest entry differs in options: all_reduce"), report.cache
    assert not machine.launched and borders(report) == 0


def test_other_words_are_refused() -> None:
    with pytest.raises(InvalidOptionValue, match="use 'auto' or 'fused' or 'library'"):
        v41.options.parse({"all_reduce": "nccl"}, None)
