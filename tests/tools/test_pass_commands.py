"""passes, why-not and diff say what the passes did, of a preset or a file; their exit code is the verdict."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tools.saved import runs, save
from tests.tools.small_models import run_of_routed, unbalanced
from v41.errors import AmbiguousSite
from v41.model_def.config import V41Config
from v41.passes import replay_rows, trim_replay
from v41.passes.pipeline import PIPELINE
from v41.passes.plan_passes import PLAN_PASSES
from v41.report import Change, PassRun
from v41.tools import pass_runs
from v41.tools.cli import main
from v41.tools.diff_command import lines
from v41.tools.hints import GENERAL, HINTS, hint
from v41.tools.inspect import capture_call, first_layers
from v41.tools.pass_runs import saved_runs
from v41.tools.report_view import BETWEEN
from v41.tools.run import run_of
from v41.tools.run_folder import save as save_run
from v41.tools.why_not import alike, judged, times_lines

Run = Callable[..., tuple[int, list[str], str]]
FOLD = [each.name for each in PIPELINE].index("fold_sinkhorn")
REFUSED = 'is refused by fold_sinkhorn: "keeps one eps"'


def fold_of(made: list[PassRun]) -> PassRun:
    return made[FOLD]


@pytest.fixture(scope="module")
def made() -> list[PassRun]:
    return runs()


@pytest.fixture
def run(
    made: list[PassRun], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a command on the saved run, where no line is broken: exit code, lines of stdout, stderr."""
    saved = save(tmp_path / "saved.json", made)
    monkeypatch.setenv("COLUMNS", "300")

    def command(*arguments: str) -> tuple[int, list[str], str]:
        code = main([*arguments, "--run", str(saved)])
        out, err = capsys.readouterr()
        return code, [line.rstrip() for line in out.splitlines()], err

    return command


def test_a_saved_run_is_what_was_saved(made: list[PassRun], tmp_path: Path) -> None:
    for key in ("graph", "graphs"):
        again = saved_runs(save(tmp_path / "saved.json", made, key=key)).runs
        assert [each.changes for each in again] == [each.changes for each in made]
        assert save(tmp_path / "again.json", again).read_text() == save(tmp_path / "saved.json", made).read_text()


def test_passes_shows_every_pass_with_what_it_did(made: list[PassRun], run: Run) -> None:
    code, table, _ = run("passes")
    assert code == 0
    assert " ".join(table[0].split()) == "pass sites applied refused nodes regions launches a step ms"
    fold = next(line for line in table if line.startswith("fold_sinkhorn"))
    before, after = fold_of(made).nodes_before, fold_of(made).nodes_after
    launches = fold_of(made).launches_before
    assert fold.split()[1:-1] == f"3 2 1 {before} -> {after} 0 -> 2 {launches} -> {launches}".split()
    assert [line.split()[0] for line in table if line.startswith(("refused", "failed"))] == ["refused", "failed"]
    assert any(line.startswith("fail (off)") for line in table)


def test_passes_as_json_has_the_same_facts_and_nothing_else_on_stdout(made: list[PassRun], run: Run) -> None:
    code, out, _ = run("passes", "--json")
    facts = json.loads("\n".join(out))
    told = facts["passes"]
    assert facts["schema"] == "v41.passes.1" and facts["expected"] == []
    assert code == 0 and [each["name"] for each in told] == [each.name for each in made]
    assert (told[FOLD]["applied"], told[FOLD]["refused"], told[FOLD]["regions_after"]) == (2, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["passes"], 1), (["why-not", "fold_sinkhorn"], 1), (["why-not", "canonicalize"], 0),
     (["why-not", "fail"], 1), (["diff", "fold_sinkhorn"], 1), (["diff", "canonicalize"], 0)],
)  # fmt: skip
def test_strictly_a_refusal_or_a_failure_is_the_verdict(arguments: list[str], code: int, run: Run) -> None:
    assert run(*arguments)[0] == 0
    assert run(*arguments, "--strict")[0] == code


@pytest.mark.parametrize("wanted", [{"sinkhorn": 3}, {"sinkhorn": 2, "moe_gate": 1}, {}])
def test_strictly_the_regions_are_those_of_the_config(
    wanted: dict[str, int], made: list[PassRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too few, of a kind that is not there at all, and one that the config knows nothing of."""
    good = [replace(run, decisions=[each for each in run.decisions if each.applied]) for run in made[:-1]]
    assert main(["passes", "--strict", "--run", str(save(tmp_path / "good.json", good))]) == 0
    assert "by the config" not in capsys.readouterr().out
    path = save(tmp_path / "bad.json", good, by_config=wanted)
    assert [main(["passes", *strictly, "--run", str(path)]) for strictly in ([], ["--strict"])] == [0, 1]
    name = "moe_gate: 0 found, 1" if "moe_gate" in wanted else f"sinkhorn: 2 found, {wanted.get('sinkhorn', 0)}"
    assert f"expected {name} by the config" in capsys.readouterr().out.splitlines()


def test_why_not_names_rule_node_line_and_hint(made: list[PassRun], run: Run) -> None:
    refusal = next(decision for decision in fold_of(made).decisions if not decision.applied)
    code, told, _ = run("why-not", "fold_sinkhorn")
    assert code == 0 and told == [
        f"{refusal.node} {REFUSED}",
        f"  site       {refusal.source}",
        f"  broken by  {refusal.culprit}  {refusal.culprit_source}",
        "  hint       add the same eps in every step",
    ]
    assert "m / (m.sum(axis, keepdim=True)" in told[1] and "tools/saved.py:" in told[2]


def test_why_not_of_a_site_shows_that_site_alone_applied_or_not(made: list[PassRun], run: Run) -> None:
    applied, refused = fold_of(made).decisions[0], fold_of(made).decisions[2]
    assert run("why-not", "fold_sinkhorn", refused.node)[1][0] == f"{refused.node} {REFUSED}"
    _, told, _ = run("why-not", "fold_sinkhorn", applied.node)
    assert told[0] == f"{applied.node} is applied by fold_sinkhorn, as a region sinkhorn" and len(told) == 2
    (site,) = json.loads("\n".join(run("why-not", "fold_sinkhorn", refused.node, "--json")[1]))["sites"]
    assert (site["rule"], site["culprit"], site["hint"]) == (refused.rule, refused.culprit, hint(refused))


@pytest.mark.parametrize(
    ("name", "told"),
    [("canonicalize", "canonicalize judged no site"), ("fail", "fail is off: KeyError: 'val'"),
     ("outline_mhc", "outline_mhc judged no site")],
)  # fmt: skip
def test_why_not_of_a_pass_without_sites_says_why(name: str, told: str, run: Run) -> None:
    assert run("why-not", name)[1][0] == told


def test_what_a_pass_applied_is_told_in_the_right_number(
    made: list[PassRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    applied = [each for each in fold_of(made).decisions if each.applied]
    for some, told in ((applied[:1], "its one site"), (applied, f"all of {len(applied)} sites")):
        path = save(tmp_path / "run.json", [replace(fold_of(made), decisions=some)])
        assert main(["why-not", "fold_sinkhorn", "--run", str(path)]) == 0
        assert capsys.readouterr().out == f"fold_sinkhorn refused nothing: it applied {told}\n"


def test_a_loop_alone_makes_nobody_expect_a_boundary(made: list[PassRun]) -> None:
    """A model that has nothing to do with mHC is warned of nothing."""
    assert fold_of(made).applied and [each.name for each in made if each.warning] == []


def test_what_passes_took_and_what_lies_between_add_up(run: Run, made: list[PassRun], tmp_path: Path) -> None:
    assert not [line for line in run("passes")[1] if line.startswith(BETWEEN)]  # a file that says of no time
    saved = json.loads((tmp_path / "saved.json").read_text())
    saved["graph"]["seconds"]["passes"] = 1.5
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    (*_, ms), *_ = [line.split() for line in run("passes")[1] if line.startswith(BETWEEN)]
    assert abs(int(ms) + sum(each.milliseconds for each in made) - 1500) < 1
    assert json.loads("\n".join(run("passes", "--json")[1]))["milliseconds_between"] == pytest.approx(int(ms), abs=1)


def test_diff_shows_what_changed_and_what_is_alike_once(run: Run) -> None:
    _, told, _ = run("diff", "fold_sinkhorn")
    assert told[0].startswith("fold_sinkhorn   ") and told[0].endswith("0 -> 2 regions")
    moved = [line for line in told if line.startswith("> ")]
    assert len(moved) == 1 and moved[0].startswith("> 9 nodes into sinkhorn_0  from ")
    assert moved[0].endswith("and 1 more like it")
    added = [line for line in told if line.startswith("+ ")]
    assert len(added) == 1 and "= region sinkhorn_0(" in added[0] and len(told) == 3
    _, whole, _ = run("diff", "fold_sinkhorn", "--all")
    assert len(whole) == 1 + 2 * 9 + 2  # every node of both chains, and both calls


def test_diff_as_json_holds_every_change(made: list[PassRun], run: Run) -> None:
    told = json.loads("\n".join(run("diff", "fold_sinkhorn", "--json")[1]))
    assert [Change(**each) for each in told["changes"]] == fold_of(made).changes


def test_a_rewired_node_is_shown_as_it_was_and_as_it_is() -> None:
    change = Change("rewired", "add_5", "aten.add.Tensor(view, 1)", "aten.add.Tensor(x, 1)", "m.py:3  y + 1")
    assert [text for _, text in lines([change], everything=False)] == [
        "~ add_5 = aten.add.Tensor(view, 1)",
        "       -> aten.add.Tensor(x, 1)  m.py:3  y + 1",
    ]


def test_a_preset_is_captured_and_its_changes_are_asked_for_where_they_are_shown(
    made: list[PassRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def run_named(arguments: Any, *, changes: bool = False) -> Any:
        asked.append(changes)
        kept = {run.name: run.changes for run in made}
        report = SimpleNamespace(passes=made, seconds={})
        return SimpleNamespace(report=report, by_config=None, changes=kept, layers=[], layer_of={})

    monkeypatch.setattr(pass_runs, "run_named", run_named)
    for command in (["passes"], ["why-not", "fold_sinkhorn"], ["diff", "fold_sinkhorn"]):
        assert main(command) == 0
    assert asked == [False, False, True] and REFUSED in capsys.readouterr().out


@pytest.mark.parametrize("source", ["a file", "a preset"])
def test_an_unknown_pass_is_refused_with_those_that_there_are(
    source: str, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_runs, "run_named", lambda *_, **__: pytest.fail("captured before the name was known"))
    for command in ("why-not", "diff"):
        code, told = (main([command, "fuse"]), []) if source == "a preset" else run(command, "fuse")[::2]
        text = told or capsys.readouterr().err
        assert code == 2 and "no pass 'fuse'" in text
        assert all(each.name in text for each in PIPELINE)


def test_sites_refused_alike_are_told_once_with_their_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    saved = str(tmp_path / "run")
    save_run(run_of(capture_call(lambda: unbalanced(3), codegen="triton"), "unbalanced"), tmp_path / "run")
    monkeypatch.setenv("COLUMNS", "300")

    def told(*more: str) -> list[str]:
        assert main(["why-not", "fold_sinkhorn", "-m", saved, *more]) == 0
        return capsys.readouterr().out.splitlines()

    sites = json.loads("\n".join(told("--json")))["sites"]
    assert [each["layers"] for each in sites] == [[0], [1], [2]]
    first, site, layers, culprit, advice = told()
    assert first == f'{sites[0]["node"]} and 2 more are refused by fold_sinkhorn: "keeps one eps"'
    assert layers.split(maxsplit=2) == ["in", "layers", "0, 1, 2"]
    every = told("--all")
    assert len(every) == 15 and {site, culprit.replace(sites[0]["culprit"], sites[2]["culprit"]), advice} <= {*every}
    assert [line.split()[-1] for line in every if line.startswith("  in layer ")] == ["0", "1", "2"]
    assert told(sites[1]["node"]) == every[5:10]


def test_sites_of_which_anything_else_is_to_be_told_stay_apart(made: list[PassRun]) -> None:
    """Other lines, rules or regions: of names and times alone nothing hangs; times go from the least to the most."""
    site = next(each for each in fold_of(made).decisions if not each.applied)
    timed = [replace(site, node=f"n{us}", times={"own": {1: us, 16: 2 * us}, "gain": {1: us}}) for us in (3.0, 1.0)]
    assert alike([site, *timed]) == [[site, *timed]]
    others = {"rule": "another", "source": "model.py:1", "culprit_source": "model.py:2", "applied": True}
    for name, value in others.items():
        assert len(alike([site, replace(site, **{name: value})])) == 2
    assert [*times_lines(timed, all_rows=True)] == ["  1 rows     own 1.0 to 3.0 us", "  16 rows    own 2.0 to 6.0 us"]
    assert [*times_lines(timed[:1], all_rows=False)] == ["  1 rows     own 3.0 us", "  16 rows    own 6.0 us"]


def test_of_sites_of_one_name_each_goes_by_its_body(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bodies that layers share have a router each, of one name; a saved run tells them apart, too."""
    saved = str(tmp_path / "run")
    save_run(run_of_routed("eager"), tmp_path / "run")
    gates = next(each for each in run_of_routed("eager").report.passes if each.name == "outline_gate").decisions
    (name,) = {each.node for each in gates}
    assert len({each.body for each in gates} - {""}) == len(gates) > 1  # as many bodies as this torch makes of them
    assert main(["why-not", "outline_gate", name, "-m", saved]) == 2
    told = capsys.readouterr().err
    assert f"{len(gates)} sites called '{name}'" in told
    assert all(f"       {each.name}  tools/small_models.py" in told for each in gates)
    for each in gates:
        assert main(["why-not", "outline_gate", each.name, "-m", saved, "--json"]) == 0
        (site,) = json.loads(capsys.readouterr().out)["sites"]
        assert each.region is not None and (site["body"], site["node"]) == (each.body, name)
        assert site["region"]["attrs"]["k"] == str(each.region.attrs["k"])
    for wrong in (f"/{name}", f"{gates[0].body}/no_such"):
        assert main(["why-not", "outline_gate", wrong, "-m", saved]) == 2
        assert f"judged no site '{wrong}'" in capsys.readouterr().err


def test_of_the_program_and_a_body_the_program_has_the_bare_slash(made: list[PassRun]) -> None:
    fold = fold_of(made)
    twin = replace(fold.decisions[2], body="shared_0")
    both = replace(fold, decisions=[*fold.decisions, twin, twin])
    assert judged(both, twin.name) == [twin, twin]  # a pass may come by a node twice
    assert judged(both, f"/{twin.node}") == [fold.decisions[2]]
    with pytest.raises(AmbiguousSite) as refusal:
        judged(both, twin.node)
    listed = [line.split()[0] for line in str(refusal.value).splitlines() if line.startswith("       ")]
    assert listed == [f"/{twin.node}", twin.name]


def test_an_older_file_names_no_bodies(made: list[PassRun], run: Run, tmp_path: Path) -> None:
    saved = json.loads((tmp_path / "saved.json").read_text())
    for each in saved["graph"]["passes"]:
        for decision in each["decisions"]:
            assert decision.pop("body") == ""
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    assert run("why-not", "fold_sinkhorn")[1][0].endswith(REFUSED)


def test_an_unknown_site_is_refused_with_those_that_there_are(made: list[PassRun], run: Run) -> None:
    code, out, told = run("why-not", "fold_sinkhorn", "view_999")
    assert (code, out) == (2, []) and "judged no site 'view_999'" in told
    assert ", ".join(decision.node for decision in fold_of(made).decisions) in told
    assert "no site was judged" in run("why-not", "canonicalize", "x")[2]


@pytest.mark.parametrize("name", PLAN_PASSES)
def test_what_edits_a_plan_changes_no_graph(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", name, "--preset", "tiny"]) == 2  # before anything is captured
    told = capsys.readouterr().err
    assert f"{name} changes a program's plan" in told and f"v41 why-not {name}" in told


def test_a_run_without_changes_cannot_be_diffed(
    made: list[PassRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = copy.deepcopy(made)
    for each in bare:
        each.changes = None
    assert main(["diff", "fold_sinkhorn", "--run", str(save(tmp_path / "bare.json", bare))]) == 2
    assert "--json --changes" in capsys.readouterr().err


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no graph": lambda saved: saved.pop("graph"),
    "two graphs": lambda saved: saved.update(graphs=[saved.pop("graph")] * 2),
    "no passes": lambda saved: saved["graph"].pop("passes"),
    "a pass without decisions": lambda saved: saved["graph"]["passes"][0].pop("decisions"),
    "a name that is none": lambda saved: saved["graph"]["passes"][0].update(name=3),
    "nodes that are no number": lambda saved: saved["graph"]["passes"][0].update(nodes_before="many"),
    "a decision without a rule": lambda saved: saved["graph"]["passes"][FOLD]["decisions"][0].pop("rule"),
    "a verdict that is none": lambda saved: saved["graph"]["passes"][FOLD]["decisions"][0].update(applied="yes"),
    "a body without a name": lambda saved: saved["graph"]["passes"][FOLD]["decisions"][0].update(body=None),
    "a site without a name": lambda saved: saved["graph"]["passes"][FOLD]["decisions"][0].update(node=None),
    "a change that is a number": lambda saved: saved["graph"]["passes"][FOLD]["changes"].append(3),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "no file", "half a file"])
@pytest.mark.parametrize("command", [["passes"], ["why-not", "fold_sinkhorn"], ["diff", "fold_sinkhorn"]])
def test_a_damaged_run_is_refused(
    damage: str, command: list[str], made: list[PassRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "saved.json", made)
    if damage in DAMAGES:
        saved = json.loads(path.read_text())
        DAMAGES[damage](saved)
        path.write_text(json.dumps(saved))
    elif damage == "no file":
        path.unlink()
    else:
        path.write_text(path.read_text()[:1000])
    assert main([*command, "--run", str(path)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and str(path) in captured.err and "holds no inspection" in captured.err


@pytest.mark.parametrize("name", PLAN_PASSES)
def test_a_pass_over_plans_that_found_nothing_can_be_asked(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "run")
    model = f"{__name__}:nothing_to_look_up"
    assert main(["capture", model, "-o", saved]) == 0
    capsys.readouterr()
    assert main(["why-not", name, "-m", saved]) == 0 == main(["why-not", name, "-m", model])
    assert capsys.readouterr().out.splitlines() == [f"{name} judged no site"] * 2


def nothing_to_look_up() -> tuple[torch.nn.Module, list[torch.Tensor]]:
    return torch.nn.ReLU(), [torch.randn(3, 4)]


def test_hints_are_of_rules_that_there_are_and_every_rule_of_these_passes_has_one(made: list[PassRun]) -> None:
    passes = [sys.modules[each.run.__module__] for each in PIPELINE]
    passes += [import_module(f"v41.passes.{name}") for name in PLAN_PASSES]
    rules = [getattr(module, "RULES", ()) for module in passes]
    by_kind = [kinds.values() if isinstance(kinds, dict) else (kinds,) for kinds in rules]
    sentences = {rule for kinds in by_kind for of_kind in kinds for rule, _ in of_kind}
    rows = (replay_rows.KNOWN, replay_rows.CUT, replay_rows.SIZED)
    assert HINTS.keys() == sentences | {trim_replay.FUNCTIONAL, *rows}
    assert hint(fold_of(made).decisions[2]) != GENERAL


@pytest.mark.slow
def test_the_tiny_preset_from_capture_to_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--preset", "tiny", "--layers", "2", "--json", "--changes", "--strict"]) == 0
    saved = tmp_path / "tiny.json"
    saved.write_text(capsys.readouterr().out)
    assert main(["passes", "--run", str(saved), "--strict", "--json"]) == 0
    told = {each["name"]: each for each in json.loads(capsys.readouterr().out)["passes"]}
    mhc = told["outline_mhc"]
    regions = [decision["region"]["kind"] for decision in mhc["decisions"]]
    config = V41Config.preset("tiny")
    chain = 3 * (2 * config.hc_sinkhorn_iters - 1)  # sum, add and div a step of Sinkhorn
    assert mhc["launches_before"] - mhc["launches_after"] > chain * regions.count("mhc_boundary") > 0
    sites = first_layers(config, 2).boundary_sites()
    assert mhc["applied"] == len(regions) == sites.coefficient_sites + sites.after_engram + sites.exit
    assert main(["why-not", "outline_mhc", mhc["decisions"][0]["node"], "--run", str(saved)]) == 0
    assert "is applied by outline_mhc, as a region mhc_boundary" in capsys.readouterr().out
    for name, each in ((name, each) for name, each in told.items() if name not in PLAN_PASSES):
        assert main(["diff", name, "--run", str(saved)]) == 0
        head, *shown = capsys.readouterr().out.splitlines()
        assert head.startswith(name)
        told_of = sum(line.startswith(tuple("+-~>")) for line in shown)
        assert min(1, len(each["changes"])) <= told_of <= len(each["changes"])
