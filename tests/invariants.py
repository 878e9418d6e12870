"""The promises of a pass, of a list of passes and of a plan, as asserts that any program can be held to.

     1  the same bits, writes and shared memory on random inputs, and in fp64   check_same_values
     2  a strategy fires often enough, and not always                           check_fired_share
     3  order, inputs, outputs, strides                                         check_kept
     4  meta is what a fresh propagation finds, and what a real run has         check_kept, check_meta_is_real
     5  effects, and their order                                                check_kept
     6  a second run; another copy, other names                                 check_settled, check_repeatable
        another process                                                         check_in_another_process
        an order that nothing asks for                                          check_commute
     7  what is outlined is moved: no node is lost, none is new                 check_moves_only
     8  no write moves over a read of the same memory                           check_same_values, check_kept
     9  streams, lives of buffers                                               check_plan_holds
    10  pieces are the program, borders what lives                              check_plan_holds
        as many pieces where nothing changed                                    check_disturbed
    11  what an artifact is kept under                                          test_artifact_key.py, test_alone_key.py
    12  changes that mean nothing change nothing                                check_disturbed
    13  one program for any number of rows                                      check_one_compile
    14  bugs that were planted are found                                        tests/passes/test_mutants.py

`check_pass` holds one pass to those that are about one pass: 1, 3 to 6, 8.
"""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tests.conftest import ROOT
from tests.strategies.noise import disturb
from v41._compat import outside_fake_mode, size_with
from v41.passes.check_plan import check_plan
from v41.passes.partition import partition
from v41.passes.pipeline import ALONG, CUT_AT, copy_of
from v41.passes.same_values import Runner, difference, random_inputs, same_bits
from v41.passes.structure import structure_key
from v41.passes.verify import Facts, facts, verify
from v41.plan import Plan
from v41.regions import Region, flatten
from v41.report import Decision
from v41.runtime.executor import eager_artifact, executor

PassFunction = Callable[[GraphModule], list[Decision]]
ROWS = (0, 1, 2, 5)


def check_pass(pass_fn: PassFunction, gm: GraphModule, rows: Sequence[int] = ROWS) -> list[Decision]:
    """Applies `pass_fn` to `gm` and returns its decisions. AssertionError names the promise that it broke."""
    before, entered = copy_program(gm), facts(gm)
    decisions = apply(pass_fn, gm)
    check_kept(entered, gm)
    for count in rows:
        check_same_values(before, gm, count)
    check_same_values(before, gm, 2, exact=True)
    check_repeatable(pass_fn, before, gm, decisions)
    check_settled(pass_fn, gm)
    return decisions


# ---- what a pass leaves as it was


def check_kept(entered: Facts, gm: GraphModule, *, but: Collection[str] = ()) -> None:
    """Every rule of verify.py holds of `gm`, `entered` being the program before; `but` those it may break."""
    verify(gm, entered, name="the pass", but=but)


def check_repeatable(
    pass_fn: PassFunction, before: GraphModule, after: GraphModule, decisions: Sequence[Decision]
) -> None:
    """It makes of a copy of `before` what it made of it, whatever nodes are called, and tells the same."""
    once = structure_key(after)
    for prefix, complaint in (("", "not deterministic"), ("renamed_", "node names matter")):
        copy = copy_program(before, prefix)
        again = apply(pass_fn, copy)
        assert list(map(nameless, again)) == list(map(nameless, decisions)), f"decisions: {complaint}"
        assert structure_key(copy) == once, f"program: {complaint}"


def check_settled(pass_fn: PassFunction, after: GraphModule) -> None:
    once = structure_key(after)
    apply(pass_fn, after)
    assert structure_key(after) == once, "a second run changes the program"


def check_moves_only(before: GraphModule, after: GraphModule) -> None:
    """With all regions inlined, `after` has the operators of `before`, each as often."""
    had, has = (Counter(operators(flatten(gm))) for gm in (before, after))
    assert had == has, f"lost {had - has}, new {has - had}"


def operators(gm: GraphModule) -> Iterator[str]:
    called = (node for node in gm.graph.nodes if node.op == "call_function")
    return (str(node.target) for node in called if node.target is not operator.getitem)


def check_commute(passes: Sequence[PassFunction], gm: GraphModule) -> None:
    """The passes give one program, in this order and in the opposite one."""
    keys = set()
    for order in (passes, passes[::-1]):
        copy = copy_program(gm)
        for each in order:
            apply(each, copy)
        keys.add(structure_key(copy))
    assert len(keys) == 1, "the order of passes that may change places matters"


def check_disturbed(pass_fn: PassFunction, gm: GraphModule, seed: int, rows: int) -> None:
    """Views, copies, swapped operands and other names, strewn into `gm`, change no decision, no value and no border.

    Of a region that reads swapped operands only the order in which it reads is another one.
    """
    disturbed, plain = disturb(copy_program(gm), seed), copy_program(gm)
    check_same_values(gm, disturbed, rows)
    told = [[(d.rule, unordered(d.region)) for d in apply(pass_fn, each)] for each in (plain, disturbed)]
    for one, other in zip_longest(*told):
        assert one == other, f"noise {seed}: {one} became {other}"
    check_same_values(gm, disturbed, rows)
    one, other = ([piece.border for piece in planned(each).pieces] for each in (plain, disturbed))
    assert one == other, f"noise {seed}: pieces {one} became {other}"


def unordered(region: Region | None) -> dict[str, Any] | None:
    """What a region says of itself, whatever order it reads in."""
    return region and {"kind": region.kind, **region.attrs, "operands": Counter(region.attrs.get("operands", ()))}


def check_in_another_process(module: str, function: str, found: str) -> None:
    """`function` of `module`, which returns a text, returns `found` in a process with another seed of hashes too."""
    code = f"from {module} import {function}; print({function}())"
    env = os.environ | {"PYTHONHASHSEED": "123"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.stdout.strip() == found, run.stderr


def check_fired_share(fired: Sequence[bool], least: float = 0.3, most: float = 0.9) -> None:
    """Of all sites that were drawn so many became regions: neither the test nor its near misses are empty."""
    share = sum(fired) / len(fired)
    assert least <= share <= most, f"{share:.0%} of {len(fired)} fired"


def check_one_compile(
    fn: Callable[..., Sequence[Tensor]], rows: Sequence[Tensor], weights: Sequence[Tensor], grid: Sequence[int]
) -> None:
    """`fn`, compiled for the first number of rows of `grid`, takes all others without a recompile, with its bits."""
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="v41", options={"codegen": "eager"}, fullgraph=True)
    for count in grid:
        taken = [row[torch.arange(count) % len(row)] for row in rows]
        expected = fn(*(each.clone() for each in (*taken, *weights)))
        for row in taken:
            torch._dynamo.decorators.mark_unbacked(row, 0, shape_id="rows")
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=count != grid[0]):
            found = compiled(*taken, *(weight.clone() for weight in weights))
        assert all(map(same_bits, found, expected)), count


def apply(pass_fn: PassFunction, gm: GraphModule) -> list[Decision]:
    """What the driver does around a pass."""
    decisions = pass_fn(gm)
    for program in everything_in(gm):
        program.graph.lint()
        program.recompile()
    return decisions


def nameless(decision: Decision) -> Decision:
    """`decision` without the names of nodes."""
    return replace(decision, node="", culprit=None)


def everything_in(gm: GraphModule) -> Iterator[GraphModule]:
    """`gm` and all its subgraphs, those of regions as well."""
    yield gm
    for body in dict.fromkeys(child for child in gm.children() if isinstance(child, GraphModule)):
        yield from everything_in(body)


def copy_program(gm: GraphModule, prefix: str = "", done: dict[GraphModule, GraphModule] | None = None) -> GraphModule:
    """A copy that no edit of `gm` reaches; subgraphs that were shared stay shared. `prefix` renames every node."""
    done = {} if done is None else done
    if gm not in done:
        graph, env = Graph(), {}
        for node in gm.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.op not in ("placeholder", "output") and prefix:
                env[node]._rename(prefix + node.name)
        attributes = {}
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                held = getattr(gm, str(node.target))
                copied = copy_program(held, prefix, done) if isinstance(held, GraphModule) else held
                attributes[str(node.target)] = copied
        done[gm] = GraphModule(attributes, graph)
        done[gm].meta = dict(gm.meta)
    return done[gm]


# ---- meaning ---------------------------------------------------------------------------------------------------------


def check_same_values(before: GraphModule, after: GraphModule, rows: int, *, exact: bool = False) -> None:
    """Both programs give the same bits, write the same inputs alike and share memory alike; `exact`: run in fp64."""
    assert difference(before, after, rows, exact=exact) is None, difference(before, after, rows, exact=exact)


class Real(Runner):
    """Runs a program and holds the value of each node to what its meta says."""

    def __init__(self, gm: GraphModule, rows: int) -> None:
        super().__init__(gm, exact=False)
        self.rows = rows

    def run_node(self, n: Node) -> Any:
        value, claimed = super().run_node(n), n.meta.get("val")
        if isinstance(value, Tensor) and isinstance(claimed, Tensor):
            assert layout(value, self.rows) == layout(claimed, self.rows), n.format_node()
        return value


def layout(value: Tensor, rows: int) -> object:
    """Type, sizes, and strides of the axes that are longer than 1, with `rows` for every symbol."""
    sizes, strides = ([size_with(n, rows) for n in numbers] for numbers in (value.shape, value.stride()))
    steps = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1 and 0 not in sizes]
    return value.dtype, sizes, steps


def check_meta_is_real(gm: GraphModule, rows: int) -> None:
    """In a real run every tensor outside of regions has the type, sizes and strides that its meta claims."""
    inputs = random_inputs(flatten(gm), rows)
    with torch.no_grad(), outside_fake_mode():
        Real(gm, rows).run(*inputs)


# ---- plans -----------------------------------------------------------------------------------------------------------


def check_plan_holds(gm: GraphModule, rows: Sequence[int] = (0, 1, 3), cut_at: Collection[str] = CUT_AT) -> Plan:
    """The plan of `gm` keeps order, lives and streams, hands on what lives, and gives the bits of the program."""
    plan = planned(gm, cut_at)
    check_plan(plan)
    check_borders(plan)
    check_plan_runs(gm, plan, rows)
    return plan


def planned(gm: GraphModule, cut_at: Collection[str] = CUT_AT) -> Plan:
    return partition(copy_of(gm), cut_at=cut_at, along=ALONG)


def check_plan_runs(gm: GraphModule, plan: Plan, rows: Sequence[int] = (0, 1, 3)) -> None:
    """The plan gives the program's bits, and leaves the same in its inputs."""
    gm.recompile()
    run = executor(plan, {piece.key: eager_artifact(piece.body) for piece in plan.pieces})
    for count in rows:
        inputs, twins = (random_inputs(flatten(gm), count) for _ in range(2))
        boxed = list(inputs)
        expected, results = (with_seed(fn) for fn in (lambda twins=twins: gm(*twins), lambda boxed=boxed: run(boxed)))
        assert boxed == []
        pairs = zip([*inputs, *results], [*twins, *expected], strict=True)
        assert all(same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def with_seed(run: Callable[[], Any]) -> Any:
    """What `run` returns where its random numbers are those of every other run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run()


def check_borders(plan: Plan) -> None:
    """Every piece reads what was made before it and nobody freed; borders hold no more than that."""
    alive = set(plan.inputs) - unread(plan)
    for index, piece in enumerate(plan.pieces):
        assert set(piece.reads) <= alive
        assert set(plan.border(index)) == alive
        assert set(piece.frees) <= alive and set(piece.returns).isdisjoint(alive)
        alive = (alive - set(piece.frees)) | set(piece.returns)
    assert alive == {name for name in plan.outputs if isinstance(name, str)}


def unread(plan: Plan) -> set[str]:
    read = {name for piece in plan.pieces for name in piece.reads} | {name for name in plan.outputs if name is not None}
    return set(plan.inputs) - read
