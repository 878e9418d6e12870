"""The driver: runs passes in order, undoes and names one that fails, goes on without it and those that need it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.compiler_bisector import CompilerBisector
from torch.fx import GraphModule

from tests.strategies.tracing import trace
from v41.errors import InvariantBroken, PassFailed, V41Error
from v41.passes.pipeline import CUT_AT, PIPELINE, Pass, copy_of, run_pipeline
from v41.passes.same_values import RULE
from v41.passes.structure import structure_key
from v41.passes.verify import RULES
from v41.regions import outline, regions
from v41.report import Decision, applied, refused

aten = torch.ops.aten


def program() -> GraphModule:
    def step(x: Tensor) -> Tensor:
        return (x * 2).relu() + 1

    return trace(step, torch.randn(3, 4))


def outline_relu(gm: GraphModule, kind: str = "relu") -> list[Decision]:
    found = [node for node in gm.graph.nodes if node.target is aten.relu.default]
    return [applied(outline(gm, [node], kind=kind)) for node in found]


def find_nothing(gm: GraphModule) -> list[Decision]:
    return []


def raise_in_the_middle(gm: GraphModule) -> list[Decision]:
    outline_relu(gm)
    raise KeyError("missing")


def lie(gm: GraphModule) -> list[Decision]:
    node = next(node for node in gm.graph.nodes if node.target is aten.mul.Tensor)
    node.target = aten.add.Tensor
    node.meta["val"] = node.meta["val"].double()
    return []


def say_nothing(gm: GraphModule) -> None:
    outline_relu(gm)


def say_how_often(gm: GraphModule) -> list[int]:
    return [len(outline_relu(gm))]


def add_two(gm: GraphModule) -> list[Decision]:
    """Sound in everything but what it computes."""
    node = next(node for node in gm.graph.nodes if node.target is aten.add.Tensor)
    node.args = (node.args[0], 2)
    return []


def refuse(gm: GraphModule) -> list[Decision]:
    relu = next(node for node in gm.graph.nodes if node.target is aten.relu.default)
    return [refused(relu, "reads an input", relu.all_input_nodes[0])]


def test_a_pass_runs_with_its_settings_and_is_counted() -> None:
    gm, (run,) = run_pipeline(program(), [Pass(outline_relu, settings={"kind": "soft"})], check=True)
    assert [node.name for node in regions(gm, "soft")]
    assert (run.name, run.applied, run.refused, run.failure, run.warning) == ("outline_relu", 1, 0, None, None)
    assert run.nodes_after == run.nodes_before + 2  # call, body reference and getitem for one node
    assert run.milliseconds > 0
    assert (run.regions_before, run.regions_after) == (0, 1)
    assert run.launches_before == run.launches_after == 3  # no kernel of its own for a region of this kind


def test_where_a_pass_raised_is_told_wherever_its_file_lies() -> None:
    """By its own line, not by torch's, which it called, nor by the driver's, which called it."""
    text = "def erase_all(gm):\n    for node in gm.graph.nodes:\n        gm.graph.erase_node(node)"
    scope: dict[str, Callable[[GraphModule], list[Decision]]] = {}
    exec(compile(text, "/elsewhere/mine/own.py", "exec"), scope)
    _, (failed,) = run_pipeline(program(), [Pass(scope["erase_all"])])
    assert failed.failure is not None and "\n  at   mine/own.py:3" in failed.failure


@pytest.mark.parametrize("broken", [raise_in_the_middle, lie, say_nothing, say_how_often])
def test_a_pass_that_fails_is_undone_and_named(broken: object) -> None:
    gm = program()
    key = structure_key(gm)
    passes = [Pass(broken), Pass(outline_relu, needs=(broken,)), Pass(find_nothing)]  # type: ignore[arg-type]
    after, (failed, dependent, other) = run_pipeline(gm, passes, check=True)
    assert structure_key(after) == key
    assert failed.failure is not None and failed.failure.startswith(("KeyError", "InvariantBroken", "TypeError"))
    assert dependent.failure == f"needs {failed.name}, which is off"
    assert other.failure is None
    after.recompile()
    x = torch.randn(5, 4)
    inputs = [x if isinstance(n.meta["val"], Tensor) else 5 for n in after.graph.nodes if n.op == "placeholder"]
    assert torch.equal(after(*inputs)[0], (x * 2).relu() + 1)


def test_the_error_of_a_broken_invariant_names_the_node() -> None:
    _, (run,) = run_pipeline(program(), [Pass(lie)], check=True)
    assert run.failure is not None and "has the meta that a fresh propagation finds; mul" in run.failure


def test_a_pass_switched_off_by_torch_is_off_for_those_that_need_it() -> None:
    passes = [Pass(outline_relu), Pass(find_nothing, needs=(outline_relu,))]
    with torch._inductor.config.patch(disabled_passes="outline_relu"):
        gm, (off, dependent) = run_pipeline(program(), passes)
    assert not list(regions(gm))
    assert off.failure is not None and "switched off" in off.failure
    assert dependent.failure == "needs outline_relu, which is off"


def test_a_pass_that_serves_kernels_of_a_kind_waits_for_them() -> None:
    passes = [Pass(outline_relu, serves="relu")]
    gm, (run,) = run_pipeline(program(), passes)
    assert (run.decisions, run.failure, run.nodes_before) == ([], None, run.nodes_after) and not list(regions(gm))
    gm, (run,) = run_pipeline(program(), passes, own=("relu",))
    assert run.decisions and list(regions(gm))


def test_a_pass_without_sites_is_worth_a_warning_only_in_a_graph_of_the_kind() -> None:
    waits = Pass(find_nothing, expects="mHC boundary", tells=True)
    _, (_, silent) = run_pipeline(program(), [Pass(outline_relu, tells=True), waits])
    assert silent.warning == "no mHC boundary found"
    for others in ([], [Pass(outline_relu, expects="relu")], [Pass(find_nothing, tells=True)]):  # of another model
        *_, told = run_pipeline(program(), [*others, waits])[1]
        assert told.warning is None
    _, (_, asked_for_nothing) = run_pipeline(program(), [Pass(outline_relu, tells=True), Pass(find_nothing)])
    assert asked_for_nothing.warning is None


def test_programs_are_kept_on_demand() -> None:
    _, (run,) = run_pipeline(program(), [Pass(outline_relu)], programs=True)
    assert run.program is not None and "relu_0" in run.program
    _, (run,) = run_pipeline(program(), [Pass(outline_relu)])
    assert run.program is None


def test_a_changed_value_is_found_where_values_are_compared() -> None:
    _, (unseen,) = run_pipeline(program(), [Pass(add_two)], check=True)
    assert unseen.failure is None
    gm, (run,) = run_pipeline(program(), [Pass(add_two)], check="numeric")
    assert run.failure is not None and f"it {RULE}; add" in run.failure
    assert structure_key(gm) == structure_key(program())
    _, (good,) = run_pipeline(program(), [Pass(outline_relu)], check="numeric")
    assert (good.applied, good.failure, good.warning) == (1, None, None)


@pytest.mark.parametrize(
    ("broken", "error"), [(raise_in_the_middle, PassFailed), (lie, InvariantBroken), (say_nothing, PassFailed)]
)
def test_strictly_a_pass_that_fails_raises(broken: object, error: type[V41Error]) -> None:
    with pytest.raises(error) as caught:
        run_pipeline(program(), [Pass(broken)], check=True, strict=True)  # type: ignore[arg-type]
    assert caught.value.facts["run"] == broken.__name__  # type: ignore[attr-defined]


def test_a_pass_switched_off_in_the_list_is_no_error_and_off_for_those_that_need_it() -> None:
    passes = [Pass(outline_relu, enabled=False), Pass(find_nothing, needs=(outline_relu,))]
    gm, (off, dependent) = run_pipeline(program(), passes, strict=True)
    assert not list(regions(gm))
    assert (off.failure, dependent.failure) == (
        "switched off in the list of passes",
        "needs outline_relu, which is off",
    )


def test_torchs_bisector_finds_the_pass_at_fault() -> None:
    whole, x = program(), torch.randn(5, 4)

    def is_right() -> bool:
        if CompilerBisector.get_backend() != "inductor":
            return True  # what it tries first, without our backend
        gm, _ = run_pipeline(copy_of(whole), [Pass(find_nothing), Pass(outline_relu), Pass(add_two), Pass(refuse)])
        inputs = [x if isinstance(n.meta["val"], Tensor) else 5 for n in gm.graph.nodes if n.op == "placeholder"]
        return torch.equal(gm(*inputs)[0], (x * 2).relu() + 1)

    found = CompilerBisector.do_bisect(is_right)
    CompilerBisector.delete_bisect_status()
    assert found is not None and (found.subsystem, found.debug_info) == ("v41", "add_two")


def test_a_refusal_knows_the_lines_of_site_and_culprit() -> None:
    _, (run,) = run_pipeline(program(), [Pass(refuse)])
    (decision,) = run.decisions
    assert (decision.node, decision.culprit, decision.rule) == ("relu", "mul", "reads an input")
    assert "(x * 2).relu() + 1" in decision.source and decision.culprit_source == decision.source


def test_a_copy_is_reached_by_no_edit() -> None:
    gm = program()
    outline_relu(gm)
    copy, key = copy_of(gm), structure_key(gm)
    assert structure_key(copy) == key
    (call,) = regions(gm)
    body = gm.get_submodule(str(call.args[0].target))  # type: ignore[union-attr]
    next(node for node in body.graph.nodes if node.op == "call_function").target = aten.neg.default
    assert structure_key(copy) == key != structure_key(gm)
    assert [node.name for node in regions(copy, "relu")]


def test_the_order_holds_what_it_needs() -> None:
    """Every pass comes once, after what it needs; what it may break are rules; names say what a pass does."""
    done: list[object] = []
    for each in PIPELINE:
        assert each.run not in done and set(each.needs) <= set(done)
        assert set(each.breaks) <= dict(RULES).keys()
        assert each.run.__module__ == f"v41.passes.{each.name}"
        done.append(each.run)
    assert all(isinstance(kind, str) for kind in CUT_AT)
