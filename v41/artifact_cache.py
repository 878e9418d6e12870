"""ArtifactCache: a second process with the same model, options and versions pays Dynamo and loads the rest.

    cold   Dynamo -> key -> miss -> AOTAutograd, passes, plan, artifacts -> stored
    warm   Dynamo -> key -> hit  -> plan and artifacts loaded, AOTAutograd's wrappers around them

Stored are AOTAutograd's wrappers, the plan without the ATen graphs of its pieces, the artifact of every key (text of
eager pieces and of generated kernels, Inductor's code), and the report. The key is in artifact_key.py, the files are in
artifact_store.py. What cannot be stored is compiled each time, and the report says why in `CompileReport.cache`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import device
from torch.fx import GraphModule

from v41._compat_cache import NotStorable, Wrapper, guards_hold, recorded, torch_caches_are_off, wrapped
from v41.artifact_key import SOURCES, Key, key_of, sources
from v41.artifact_store import ArtifactStore, Miss, open_store
from v41.gains import digest_of
from v41.options import Options
from v41.plan import Plan
from v41.report import CompileReport, programs_wanted

Artifact = Callable[..., tuple[Any, ...]]

KEPT = ("options", "passes", "pieces", "artifacts", "kernels", "fallbacks")  # of the report
AT_RUN_TIME = ("capture", "buckets", "tune")  # options that change nothing of what is compiled
PASSING = ("Inductor raised", "compiles nothing here")  # troubles that the next process may not have


@dataclass(frozen=True)
class Program:
    """An entry of the store."""

    wrapper: bytes  # AOTAutograd's, with the guards that compiling added
    plan: Plan
    artifacts: dict[str, Artifact]
    report: dict[str, Any]
    seconds: float  # what compiling took

    def wrapped(self, run: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo is to call, for the function `run` that runs plan and artifacts."""
        return wrapped(self.wrapper, run, inputs)


@dataclass
class ArtifactCache:
    """The cache as one compile sees it. `says` is its line in the report."""

    says: str
    store: ArtifactStore | None = None
    key: Key | None = None
    seconds: float = 0.0  # what the key took

    def load(self, report: CompileReport, inputs: Sequence[Any]) -> Program | None:
        """The entry, if there is one that fits, and the report filled from it. If not, `says` tells why."""
        if self.store is None or self.key is None:
            return None
        start = time.perf_counter()
        found = self.store.get(self.key)
        if isinstance(found, Miss):
            self.says = f"miss: {found.why}"
            return None
        program = cast(Program, found)
        if not guards_hold(program.wrapper, inputs):
            self.says = "miss: the sizes of these inputs break a guard of the entry"
            return None
        for name, value in program.report.items():
            setattr(report, name, value)
        report.plan, report.seconds = program.plan, {"cache": self.seconds + time.perf_counter() - start}
        self.says = report.cache = f"hit {self.key.digest[:8]}: spared {program.seconds:.1f} s of compiling"
        return program

    def recorded(self) -> AbstractContextManager[Wrapper]:
        """Around AOTAutograd: keeps what `save` needs of it."""
        return recorded() if self.store is not None else nullcontext(Wrapper())

    def save(
        self,
        wrapper: Wrapper,
        plan: Plan,
        artifacts: Mapping[str, Artifact],
        report: CompileReport,
        inputs: Sequence[Any],
    ) -> None:
        """Stores what was compiled; `says` and the report's line tell whether it was."""
        if self.store is None or self.key is None:
            return
        refusal = passing_trouble(report) or sources_changed()
        if refusal is None:
            try:
                program = Program(
                    wrapper.stored(inputs),
                    plan.without_bodies(),
                    dict(artifacts),
                    {name: getattr(report, name) for name in KEPT},
                    sum(report.seconds.values()),
                )
                refusal = self.store.put(self.key, program)
            except NotStorable as error:
                refusal = str(error)
        self.says += f"; not stored: {refusal}" if refusal else "; stored"
        report.cache = self.says


def open_cache(
    gm: GraphModule, options: Options, passes: Iterable[tuple[str, Callable[..., Any]]], where: device
) -> ArtifactCache:
    """The cache for compiling Dynamo's graph `gm`. Where there is none, it loads and stores nothing, and says why."""
    store = open_store()
    refusal = (
        "options" if not options.cache
        else store if isinstance(store, str)
        else "collect(programs=True) asks for the text of every program" if programs_wanted()
        else torch_caches_are_off()
    )  # fmt: skip
    if refusal is not None:
        return ArtifactCache(f"off: {refusal}")
    start = time.perf_counter()
    try:
        asked = {name: value for name, value in asdict(options).items() if name not in AT_RUN_TIME}
        if options.overlap != "off":
            asked["overlap"] = f"{options.overlap}, gains {digest_of(where)}"
        key = key_of(gm, options=asked, passes=passes, device=where)
    except NotStorable as error:
        return ArtifactCache(f"off: {error}")
    return ArtifactCache("miss", cast(ArtifactStore, store), key, time.perf_counter() - start)


def passing_trouble(report: CompileReport) -> str | None:
    """What went wrong here and need not in another process, so that it is tried again there."""
    failed = next((run for run in report.passes if run.failure), None)
    if failed is not None:
        return f"the pass {failed.name} failed"
    told = [*report.fallbacks, *(why for _, why in report.options.values())]
    return next((line for line in told if any(words in line for words in PASSING)), None)


def sources_changed() -> str | None:
    """Files that were edited since this process read them: what they make now would stand under a wrong key."""
    now = sources()
    changed = [name for name in sorted(now.keys() | SOURCES.keys()) if now.get(name) != SOURCES.get(name)]
    return f"sources changed since the start of this process: {', '.join(changed)}" if changed else None
