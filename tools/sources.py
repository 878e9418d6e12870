"""sources: what MODEL means on the command line, and the Run of it.

tiny, bench, flash      a preset, on tensors without storage; flash/ is a folder of that name
FOLDER                  of a released checkpoint: its config.json alone is read, no weights
FOLDER or FILE          what `v41 capture` wrote, or, for what passes did, `v41 inspect --json`
MODULE:FUNCTION         a function of yours, without arguments, that returns (model, inputs); imported from here

run_named(arguments)       reads or captures it
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import nn

from v41._compat_groups import ALL, pretended
from v41.errors import FunctionUnusable, NeedsModel, UnknownModel, UnusedOption
from v41.model_def.config import PRESETS, V41Config
from v41.model_def.model import V41ForCausalLM
from v41.model_def.parallel import WHOLE, Share
from v41.report import collect
from v41.sums import LIBRARY
from v41.tools.inspect import PHASES, Inspection, capture_call, first_layers, line_of, step_of
from v41.tools.nearest import choices
from v41.tools.progress import progress
from v41.tools.run import Run, run_of
from v41.tools.run_folder import MAIN, load
from v41.tools.tables import counted

CODEGEN = "triton"  # as which a model is captured where none is asked for
OF_CAPTURES = ("codegen", "layers", "ranks", "all_reduce")  # options that say how a model is captured
BY_LIBRARY = "sums by the library"  # so a model is called whose ranks are not to add up in kernels


@dataclass(frozen=True)
class Model:
    """A model that can be captured. `make` returns it with the inputs of a call."""

    name: str  # "preset flash, 3 layers"
    make: Callable[[], tuple[nn.Module, Sequence[Any]]]
    ranks: int = 1  # that share it
    all_reduce: str | None = None  # the backend's option of that name; None where nobody asked


def run_named(arguments: Namespace, *, changes: bool = False) -> Run:
    """The run that `arguments` name, read or captured now; with what passes changed, where `changes`."""
    if is_run(arguments.model):
        refuse_unused(arguments, OF_CAPTURES, "the run was captured with its own")
        return load(Path(arguments.model))
    if is_run(f"{arguments.model}/"):  # which takes seconds where a capture takes minutes
        told = Text(f"captures the preset; the run that lies here is {arguments.model}/")
        Console(stderr=True).print(told, soft_wrap=True)
    return captured(arguments, changes=changes)


def is_run(name: str) -> bool:
    """Whether `name` is a saved run. The name of a preset is that, whatever lies here; flash/ is a folder."""
    if name in PRESETS:
        return False
    return os.path.isfile(os.path.join(name, MAIN))  # which answers for any text, one too long for a path as well


def needs_model(folder: str, what: str, command: str) -> NeedsModel:
    """The refusal of a saved run by a `command` that runs the model. {} in it: what was captured, as one types it."""
    source = load(Path(folder)).source
    name, *cuts = source.split(", ")
    words = [name.removeprefix("preset ").removeprefix("checkpoint ")]
    words += [f"--layers {cut.split()[0]}" for cut in cuts if cut.endswith((" layer", " layers"))]
    words += [f"--ranks {cut.split()[2]}" for cut in cuts if cut.endswith(" ranks")]
    words += [f"--all-reduce {LIBRARY}" for cut in cuts if cut == BY_LIBRARY]
    return NeedsModel(folder, what=what, source=source, command=command.format(" ".join(words)))


def captured(arguments: Namespace, *, changes: bool = False) -> Run:
    """The model of `arguments`, captured. The changes are kept in memory for as long as the result is."""
    model = model_of(arguments)
    return run_of(inspected(model, arguments.codegen or CODEGEN, changes=changes), model.name)


def check_sums(arguments: Namespace) -> None:
    """UnusedOption where --all-reduce changes nothing: one process adds up nothing, and kernels are Triton's."""
    if arguments.ranks in (None, 1):
        refuse_unused(arguments, ("all_reduce",), "only ranks add up, as with --ranks 4")
    if arguments.codegen not in (None, CODEGEN):
        refuse_unused(arguments, ("all_reduce",), f"codegen {arguments.codegen} generates no kernels")


def model_of(arguments: Namespace) -> Model:
    """The model that `arguments` name. UnusedOption where it cannot be cut or shared as they say."""
    name = arguments.model
    if ":" in name and name not in PRESETS and not os.path.isdir(name):
        refuse_unused(arguments, ("layers", "ranks"), "the function returns the model as it is to be")
    check_sums(arguments)
    return model_named(name, arguments.layers, arguments.ranks or 1, arguments.all_reduce)


def refuse_unused(arguments: Namespace, names: Sequence[str], reason: str) -> None:
    """UnusedOption for the first of the options `names` that was given."""
    for name in names:
        if getattr(arguments, name, None) is not None:
            raise UnusedOption(f"v41 {arguments.command}", option=f"--{name.replace('_', '-')}", reason=reason)


def inspected(model: Model, codegen: str, *, changes: bool = False, verify: bool | str = False) -> Inspection:
    """`model` through capture and passes, as for `codegen`; a bar shows what goes on."""
    group = pretended(model.ranks) if model.ranks > 1 else contextlib.nullcontext()
    with group, progress() as bars, collect(programs=changes):
        what = "verify" if verify else "capture"
        told = bars.begin(what, len(PHASES))
        return capture_call(model.make, codegen=codegen, verify=verify, all_reduce=model.all_reduce, told=told)


def model_named(name: str, layers: int | None = None, ranks: int = 1, all_reduce: str | None = None) -> Model:
    """The model of that name, cut to its first `layers`, as the first of `ranks` runs it. UnknownModel says what names
    there are, and the nearest."""
    if is_run(name):
        raise needs_model(name, "a capture traces the model", "v41 capture {} -o RUN")
    if name in PRESETS:
        return _of_config(f"preset {name}", V41Config.preset(name), layers, ranks, all_reduce)
    if os.path.isdir(name):
        return _of_config(f"checkpoint {Path(name).name}", V41Config.from_json(name), layers, ranks, all_reduce)
    if ":" in name:
        return Model(name, lambda: call_of(name))
    raise UnknownModel("v41 MODEL", name=name, known=choices(name, PRESETS))


def _of_config(name: str, config: V41Config, layers: int | None, ranks: int, all_reduce: str | None) -> Model:
    cut = first_layers(config, layers or config.num_hidden_layers)
    told = name if cut is config else f"{name}, {counted(cut.num_hidden_layers, 'layer')}"
    share = Share(0, ranks, ALL) if ranks > 1 else WHOLE
    told += f", one of {ranks} ranks" if ranks > 1 else ""
    told += f", {BY_LIBRARY}" if all_reduce == LIBRARY else ""
    return Model(told, lambda: step_of(lambda: V41ForCausalLM(cut, share)), ranks, all_reduce)


def call_of(name: str) -> tuple[nn.Module, Sequence[Any]]:
    """What the function MODULE:FUNCTION returns. FunctionUnusable, at the line that failed, where it is no such pair.
    What it prints goes to stderr: beside JSON, stdout is for that alone."""
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            made = getattr(import_module(module), function)()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of anybody's code, which may raise anything, and exit
        told = (str(error).strip() or "no message").splitlines()[0]
        problem = f"{type(error).__name__}: {told}"
        raise FunctionUnusable(_raised_at(error) or name, function=name, problem=problem) from error
    match made:
        case (nn.Module() as model, (tuple() | list()) as inputs):
            return model.eval(), inputs
    raise FunctionUnusable(name, function=name, problem=f"it returned {_spelled(made)}")


def _raised_at(error: BaseException) -> str | None:
    """The line of the user's that raised: behind ours and the machinery of imports; of a module that cannot be parsed,
    the line at fault. None where none of the user's ran."""
    if isinstance(error, SyntaxError) and error.filename:
        return line_of(FrameSummary(error.filename, error.lineno, "", line=(error.text or "").strip()))
    frames = traceback.extract_tb(error.__traceback__)[1:]
    theirs = [each for each in frames if not each.filename.startswith(("<frozen ", importlib.__file__))]
    return line_of(theirs[-1]) if theirs else None


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(each).__name__ for each in value)})"
    return f"a {type(value).__name__}"
