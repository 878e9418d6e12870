"""What `torch.compile(model, backend="v41", options={...})` may say: one frozen dataclass, each value checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from v41.errors import InvalidOptionValue, ModeRefused, UnknownOption

CODEGENS = ("auto", "eager", "inductor", "triton")
CAPTURES = ("auto", "off")
OVERLAPS = ("auto", "on", "off")
ALL_REDUCES = ("auto", "fused", "library")
NUMERIC = "numeric"  # the third value of verify


@dataclass(frozen=True)
class Options:
    """`codegen`: how pieces run. "eager" runs their ATen nodes, "inductor" compiles them with the rounding points kept,
    "triton" generates a kernel for each piece of regions on a GPU and leaves the others to Inductor (or eager),
    "auto" takes eager on a CPU, where programs are checked and Inductor needs minutes for its C++, Triton on a GPU, and
    elsewhere Inductor where it keeps the rounding points, else eager (the report says which and why).
    `capture`: "auto" makes CUDA graphs of steps whose sizes lie on their ladders where there is a CUDA device.
    `buckets`: name of a size -> the ladder it is padded to, where not to the model's own (model_def/buckets.py).
    `verify`: check every program after every pass (lint, order, meta, effects, aliases, signature); "numeric" also runs
    it before and after each pass on random inputs, and holds it to the same bits.
    `strict`: raise where a pass fails or breaks an invariant, rather than compile without it.
    `tune`: time the schedules of generated kernels at every new bucket of rows, on what the step runs on, and keep the
    fastest for later processes (lowering/tuned.py); what another process kept is used anyway.
    `overlap`: work with slack runs on side streams in captured decode steps, where that is faster (overlap.py; what
    `v41 bench overlap --sites` measured on this GPU decides before all else); "on" runs it in uncaptured steps too.
    `all_reduce`: "fused" adds up over ranks in the kernel that reads the sum, where the ranks' GPUs can write each
    other's memory; then steps of one process come one after the other on the device, as for any collective. "library"
    leaves collectives as they are. "auto" takes the kernels where all ranks can (sums.py).
    `cache`: take what an earlier process compiled, and leave what this one compiles (artifact_store.py says where).
    """

    codegen: str = "auto"
    verify: bool | str = False
    strict: bool = False
    capture: str = "auto"
    buckets: Mapping[str, Sequence[int]] | None = None
    overlap: str = "auto"
    all_reduce: str = "auto"
    cache: bool = True
    tune: bool = False


def parse(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """Options from torch.compile's keywords. UnknownOption, InvalidOptionValue or ModeRefused say what exists."""
    known = ", ".join(f"{field.name} (default {field.default!r})" for field in fields(Options))
    if mode not in (None, "default"):
        raise ModeRefused("torch.compile(mode=...)", mode=mode, known=known)
    if not isinstance(options, Mapping | None):
        raise _invalid("options=", options, "a dict: {" + known + "}")
    given = dict(options or {})
    for name in given:
        if name not in {field.name for field in fields(Options)}:
            raise UnknownOption("torch.compile(options=...)", option=name, known=known)
    parsed = Options(**given)
    worded = {"codegen": CODEGENS, "capture": CAPTURES, "overlap": OVERLAPS, "all_reduce": ALL_REDUCES}
    for name, words in worded.items():
        if not isinstance(value := getattr(parsed, name), str) or value not in words:
            raise _invalid(name, value, " or ".join(map(repr, words)))
    if not isinstance(parsed.buckets, Mapping | None) or not all(map(_is_ladder, (parsed.buckets or {}).items())):
        raise _invalid("buckets", parsed.buckets, "a dict from names of sizes to tuples of ascending integers above 0")
    if parsed.verify != NUMERIC and not isinstance(parsed.verify, bool):
        raise _invalid("verify", parsed.verify, f"True, False or {NUMERIC!r}")
    for switch in ("strict", "cache", "tune"):
        if not isinstance(value := getattr(parsed, switch), bool):
            raise _invalid(switch, value, "True or False")
    return parsed


def _is_ladder(item: tuple[object, object]) -> bool:
    name, rungs = item
    if not isinstance(name, str) or not isinstance(rungs, tuple | list) or not rungs:
        return False
    return all(type(n) is int and n > 0 for n in rungs) and list(rungs) == sorted({*rungs})


def _invalid(option: str, value: object, allowed: str) -> InvalidOptionValue:
    return InvalidOptionValue("torch.compile(options=...)", option=option, value=value, allowed=allowed)
