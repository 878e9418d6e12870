"""Values that a pass changed are found, whatever else it kept; inputs index what they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.invariants import apply
from tests.strategies.tracing import trace
from v41.errors import InvariantBroken
from v41.model_def.batch import Chunk, build_batch
from v41.model_def.cache import Cache
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.passes import same_values
from v41.passes.canonicalize import canonicalize
from v41.passes.pipeline import PIPELINE, copy_of
from v41.passes.same_values import RULE, check_values, difference, random_inputs, random_like, same_bits, span_of
from v41.report import collect
from v41.tools.inspect import first_layers

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def program() -> GraphModule:
    """Rows looked up, rounded, written to a cache, read again."""

    def step(x: Tensor, ids: Tensor, slots: Tensor, table: Tensor, cache: Tensor) -> Tensor:
        cache[slots] = torch.nn.functional.embedding(ids, table) + x.bfloat16().float()
        return cache[slots] * 2 + ids.unsqueeze(1)

    ids = torch.tensor([0, 1])
    return trace(step, torch.randn(2, 4), ids, ids + 0, static=(torch.randn(7, 4), torch.zeros(50, 4)))


def multiply_by_three(gm: GraphModule) -> str:
    node = next(node for node in gm.graph.nodes if node.target is aten.mul.Tensor)
    node.args = (node.args[0], 3)
    return node.name


def skip_the_rounding(gm: GraphModule) -> str:
    casts = [n for n in gm.graph.nodes if n.target is torch.ops.prims.convert_element_type.default]
    casts[-1].replace_all_uses_with(casts[0].args[0])
    return next(iter(node.name for node in gm.graph.nodes if node.target is aten.add.Tensor))


def write_zeros(gm: GraphModule) -> str:
    node = next(node for node in gm.graph.nodes if node.target is aten.copy_.default)
    with gm.graph.inserting_before(node):
        zero = gm.graph.call_function(aten.zeros_like.default, (node.args[1],))
    node.args = (node.args[0], zero)
    return node.name


@pytest.mark.parametrize("damage", [multiply_by_three, skip_the_rounding, write_zeros])
def test_a_changed_value_is_named_with_the_first_node_that_differs(damage: Callable[[GraphModule], str]) -> None:
    before, after = program(), program()
    assert check_values(before, copy_of(after), name="nothing") is None
    culprit = damage(after)
    with pytest.raises(InvariantBroken) as caught:
        check_values(before, copy_of(after), name="careless")
    assert (caught.value.facts["rule"], caught.value.facts["node"]) == (RULE, culprit)


def test_a_pass_that_forgets_what_is_no_pick_is_noticed() -> None:
    picks = torch.tensor([0, -1])
    before = trace(lambda x, picks: x[picks.clamp(min=0)] + picks.unsqueeze(1), torch.randn(2, 4), picks)
    after = copy_of(before)
    (clamp,) = (node for node in after.graph.nodes if node.target is aten.clamp_min.default)
    clamp.replace_all_uses_with(clamp.args[0])
    with pytest.raises(InvariantBroken):
        check_values(before, copy_of(after), name="careless")


def test_what_cannot_be_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = trace(lambda x: x.view(-1, 8) * 2, torch.randn(8, 4), backed=True)  # 2 rows of 4 do, 3 do not
    assert check_values(gm, gm, name="nothing") is None
    never = trace(lambda x: x.cpu() + 1, torch.randn(2, 4))
    next(n for n in never.graph.nodes if n.target is aten.add.Tensor).args = (1, 2, 3)
    told = check_values(copy_of(never), copy_of(never), name="nothing")
    assert told is not None and told.startswith("values not compared: the program does not run on random inputs")
    monkeypatch.setattr(same_values, "LIMIT", 100)
    assert check_values(program(), program(), name="nothing") == "values not compared: the inputs take 9.09e-07 GiB"


def test_bits_that_are_read_as_floats_say_nothing_in_fp64() -> None:
    """Half as many numbers fit the sizes of this program by luck, and not once it says how many there are."""

    def scaled(x: Tensor, bits: Tensor) -> Tensor:
        return x * bits.view(torch.float32).unsqueeze(-1)

    before = trace(scaled, torch.randn(5, 2, 4), torch.zeros(5, 2, dtype=torch.int32))
    after = copy_of(before)
    apply(canonicalize, after)
    assert difference(before, after, 3, exact=True) is None
    assert check_values(before, after, name="canonicalize") is None


def test_integers_reach_all_of_what_they_index_and_no_further() -> None:
    gm = program()
    spans = [span_of(node, 2) for node in gm.graph.find_nodes(op="placeholder")]
    assert (0, 50) in spans  # slots index the cache alone; ids are also added, so nobody knows
    drawn = [value for value in random_inputs(gm, 40) if isinstance(value, Tensor) and not value.is_floating_point()]
    assert sorted(int(value.max()) for value in drawn)[0] == 1 and 20 < max(int(value.max()) for value in drawn) < 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_an_expanded_input_has_each_number_many_times(dtype: torch.dtype) -> None:
    like = torch.zeros(5, 1, 3, dtype=dtype).expand(5, 4, 3)
    drawn = random_like(like, 5, torch.Generator().manual_seed(0), False, 0, 1000)
    assert (drawn.shape, drawn.stride()) == (like.shape, like.stride())
    assert bool((drawn == drawn[:, :1]).all()) and len(drawn.unique()) > 5


def test_divisors_are_not_zero() -> None:
    ids, primes = torch.tensor([3, 4]), torch.tensor([7, 11])
    gm = trace(lambda ids, primes: ids.unsqueeze(1) % primes, ids, static=(primes,))
    assert sorted(span_of(node, 2) for node in gm.graph.find_nodes(op="placeholder"))[-1] == (1, 3)
    assert check_values(gm, gm, name="nothing") is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_compared_in_any_type(dtype: torch.dtype) -> None:
    nan = torch.tensor([float("nan"), 0.0, 1.0]).to(dtype)
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0, 1.0]).to(dtype))
    assert not same_bits(nan, torch.tensor([2.0, 0.0, 1.0]).to(dtype))


def test_the_difference_says_which_value_and_with_how_many_rows() -> None:
    before, after = program(), program()
    multiply_by_three(after)
    told = difference(before, copy_of(after), 5)
    assert told is not None and told.endswith("of inputs and outputs differs with 5 rows")
    assert difference(before, copy_of(after), 0) is None  # no rows, no difference


@pytest.mark.slow
def test_the_values_of_a_whole_model_are_compared_after_every_pass() -> None:
    config = first_layers(V41Config.preset("tiny"), 2)
    cache = Cache.zeros(config, slots=2, capacity=64)
    batch = build_batch(config, cache, [Chunk([5, 6, 7], start=0, slot=0), Chunk([8, 9], start=0, slot=1)])
    options = {"codegen": "eager", "verify": "numeric"}
    with torch.no_grad(), collect() as reports:
        torch.compile(V41ForCausalLM(config), backend="v41", options=options)(batch, cache)
    runs = reports[0].passes
    assert [run.failure for run in runs] == [None] * len(PIPELINE)
    not_compared = {run.name: run.warning for run in runs if run.warning}
    assert not_compared.keys() == {"trim_replay"}  # random numbers keep no promises of a batch
    assert "rests on promises of a batch" in str(not_compared["trim_replay"])


# ---- ranks


def said(x: Tensor) -> list[Tensor]:
    total = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))
    parts = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 3, "0"))
    mine = c10d.wait_tensor(c10d.reduce_scatter_tensor(parts, "sum", 3, "0"))
    return [total, c10d.wait_tensor(c10d.all_reduce(x, "max", "0")), parts.sin(), mine]


def lose_a_sum(gm: GraphModule) -> None:
    wait = next(node for node in gm.graph.nodes if node.target is c10d.wait_tensor.default)
    wait.replace_all_uses_with(wait.args[0].args[0])
    gm.graph.erase_node(wait)


@pytest.fixture
def three_ranks() -> Iterator[None]:
    """Of whom this process has a group that answers every question with what it was given."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("three_ranks")
def test_other_ranks_are_not_asked_and_a_lost_sum_is_found() -> None:
    """A rank that fails on inputs on which another runs would leave that one waiting."""
    gm = trace(said, torch.randn(2, 4))
    assert check_values(copy_of(gm), copy_of(gm), name="nothing") is None
    given = random_inputs(gm, 2)
    (x,) = (each for each in given if isinstance(each, Tensor))
    total, most, parts, mine = same_values.run(gm, given)
    assert same_bits(total, 3 * x) and same_bits(most, x)
    assert same_bits(parts, torch.cat([x] * 3).sin()) and same_bits(mine, 3 * x)
    after = copy_of(gm)
    lose_a_sum(after)
    after.recompile()
    with pytest.raises(InvariantBroken) as caught:
        check_values(copy_of(gm), after, name="careless")
    assert caught.value.facts["rule"] == RULE
