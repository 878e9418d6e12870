"""Released checkpoints: read into a model tensor by tensor, as stored; write a model in the same layout.

    config.json                              V41Config.from_json
    model.safetensors, or shards with model.safetensors.index.json
    engram_token_map.safetensors             ours, optional: `token_map`; a release has its tokenizer.json instead

A module's parameter names are the released names. What differs is here: the experts of one linear are stacked in the
model and single in the file; scale bytes are e8m0 there and uint8 here. The file decides how two kinds of weight are
held: `attn.wo_a`, fp8 in a release and bf16 where somebody has decoded it, and what the model multiplies in fp32, bf16
or fp32.

Tensors are brought in one by one, so that loading takes the memory of the model and of one tensor. Engram's tables are
not brought in at all: they stay mapped from their file, in the host's memory, and a look-up reads its rows.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from v41.model_def.attention import Attention
from v41.model_def.config import V41Config, read_json
from v41.model_def.engram import Engram, EngramTable
from v41.model_def.errors import (
    CheckpointError,
    CheckpointFileError,
    CheckpointNotWritten,
    FileUnreadable,
    PartOfAModel,
    ShareNotWhole,
)
from v41.model_def.linear import Fp8Linear, Fp32Linear, Linear
from v41.model_def.moe import ExpertLinear, Fp4ExpertLinear, Gate
from v41.model_def.parallel import WHOLE, Share, split_dimension
from v41.model_def.quantization import GROUP
from v41.model_def.stored_tensors import StoredTensor, read_header
from v41.model_def.token_map import read_token_map

WEIGHTS, INDEX, TOKEN_MAP = "model.safetensors", "model.safetensors.index.json", "engram_token_map.safetensors"
NOT_USED = ("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline")  # the draft; what images need
NOT_USED_SUFFIX = ".gate.bias_vl"  # the gate's bias inside image spans
NO_NUMBER = 255  # of e8m0
BYTES, SCALES = {torch.uint8, torch.int8}, (torch.float8_e8m0fnu, torch.uint8)

Progress = Callable[[int, int], None]  # bytes so far, and of all


@dataclass(frozen=True)
class Slot:
    """Where one tensor of the file goes: `expert` picks a slice of a stacked parameter."""

    module: nn.Module
    name: str  # of the parameter in the module
    expert: int | None
    dtypes: tuple[torch.dtype, ...]  # that the file may have
    share: Share
    dimension: int | None  # along which ranks share the file's tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        return tuple(n * self.share.world if d == self.dimension else n for d, n in enumerate(self.parameter.shape))

    def part(self, stored: Tensor) -> Tensor:
        """What this rank holds of the file's tensor."""
        if self.dimension is None:
            return stored
        size = self.parameter.shape[self.dimension]
        return stored.narrow(self.dimension, size * self.share.rank, size)

    @property
    def parameter(self) -> Tensor:
        parameter = getattr(self.module, self.name)
        return parameter if self.expert is None else parameter[self.expert]


@dataclass(frozen=True)
class LoadSummary:
    """What was read, what the file has beyond that, and where Engram's compressed ids came from."""

    loaded: int
    not_used: tuple[str, ...]  # recognised: the draft, vision
    token_map: str


def slots(model: nn.Module) -> dict[str, Slot]:
    """Released name -> where it goes, for every parameter of the model."""
    found, share = dict[str, Slot](), getattr(model, "share", WHOLE)
    for released, module, name, expert in places(model):
        parameter = getattr(module, name)
        dtypes, dimension = stored_dtypes(module, name, parameter), split_dimension(released)
        found[released] = Slot(module, name, expert, dtypes, share, dimension)
    return found


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, int | None]]:
    """Released name, module, name in the module, number of the expert; of the stacked, one each."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, ExpertLinear | Fp4ExpertLinear):  # layers.0.ffn.experts.w1 -> ...experts.7.w1
                head, _, tail = path.rpartition(".")
                yield from ((f"{head}.{e}.{tail}.{name}", module, name, e) for e in range(parameter.shape[0]))
            else:
                yield f"{path}.{name}".lstrip("."), module, name, None


def stored_dtypes(module: nn.Module, name: str, parameter: Tensor) -> tuple[torch.dtype, ...]:
    """What the file may hold for a parameter; the first is what a release holds."""
    if name == "scale":
        return SCALES
    if parameter.dtype in BYTES:  # packed pairs
        return torch.int8, torch.uint8
    widened = isinstance(module, Fp32Linear | Gate) and name == "weight"
    return (torch.bfloat16, torch.float32) if widened else (parameter.dtype,)


@torch.no_grad()
def load_checkpoint(
    model: nn.Module,
    folder: str | Path,
    device: torch.device | str = "cpu",
    progress: Progress = lambda done, whole: None,
) -> LoadSummary:
    """Fills `model`, which may be on the meta device, and moves it to `device`. CheckpointError lists all misfits;
    FileUnreadable where a file is damaged."""
    folder = Path(folder)
    stored, misplaced = stored_tensors(folder)
    unused = tuple(sorted(name for name in stored if is_not_used(name)))
    with held_as_stored(model, stored):
        targets = slots(model)
        check_fit(folder, targets, {name: tensor for name, tensor in stored.items() if name not in unused}, misplaced)
    done, whole = 0, sum(stored[name].nbytes for name in targets)
    for name in sorted(targets, key=lambda name: (stored[name].file, stored[name].begin)):
        fill(targets[name], name, stored, device)
        progress(done := done + stored[name].nbytes, whole)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    engrams = [module for module in model.modules() if isinstance(module, Engram)]
    if not engrams:
        return LoadSummary(len(targets), unused, "no Engram layers")
    token_map, source = find_token_map(folder, engrams[0])
    if token_map is not None:
        set_token_map(model, token_map)
    return LoadSummary(len(targets), unused, source)


def stored_tensors(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """What the folder's files hold, by name; and what the index is wrong about, a line for each name.

    CheckpointFileError where the folder holds no checkpoint.
    """
    places: dict[str, str] = {}
    if os.path.exists(folder / INDEX):  # of names that are too long, paths raise
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise FileUnreadable(folder / INDEX, problem="it has no weight_map")
        places = {name: str(shard) for name, shard in weight_map.items()}
    shards = sorted(set(places.values())) or [WEIGHTS]
    lost = [shard for shard in shards if not os.path.isfile(folder / shard)]
    if lost:
        raise CheckpointFileError(folder, problem=f"no {', '.join(lost)}")
    headers = {shard: read_header(folder / shard) for shard in shards}
    misplaced = {
        name: f"{name} is not in {shard}, where {INDEX} puts it"
        for name, shard in places.items()
        if name not in headers[shard]
    }
    found = dict[str, StoredTensor]()
    for shard, header in headers.items():
        for name, tensor in header.items():
            if places.get(name, shard) == shard and (first := found.setdefault(name, tensor)) is not tensor:
                misplaced[name] = f"{name} is in {first.file.name} and in {shard}, and {INDEX} names neither"
    return found, misplaced


def is_not_used(name: str) -> bool:
    return name.startswith(NOT_USED) or name.endswith(NOT_USED_SUFFIX)


@contextmanager
def held_as_stored(model: nn.Module, stored: dict[str, StoredTensor]) -> Iterator[None]:
    """Makes each `attn.wo_a` the kind of linear that its file has, still to be filled; an error undoes it.

    ShareNotWhole where a rank's part of an fp8 one would begin inside of a block under one scale.
    """
    before, share = list[tuple[Attention, Linear | Fp8Linear]](), getattr(model, "share", WHOLE)
    try:
        for path, attention in model.named_modules():
            file = stored.get(f"{path}.wo_a.weight")
            if not isinstance(attention, Attention) or file is None:
                continue
            old, kind = attention.wo_a, Fp8Linear if file.dtype == torch.float8_e4m3fn else Linear
            if kind is Fp8Linear and share.world > 1 and old.out_features % GROUP:
                sizes = {f"{path}.wo_a in groups of {GROUP}": old.out_features * share.world}
                raise ShareNotWhole("load_checkpoint(share=...)", world=share.world, sizes=sizes)
            if type(old) is not kind:
                before.append((attention, old))
                with torch.device("meta"):
                    attention.wo_a = kind(old.in_features, old.out_features, old.gain)
        yield
    except (CheckpointError, ShareNotWhole):
        for attention, old in before:
            attention.wo_a = old
        raise


def check_fit(
    folder: Path, targets: dict[str, Slot], files: dict[str, StoredTensor], misplaced: dict[str, str]
) -> None:
    """Compares names, shapes and types without reading a tensor."""
    misfits: dict[str, list[str]] = {"shape": [], "dtype": []}
    for name in sorted(targets.keys() & files.keys()):
        slot, shape, dtype = targets[name], files[name].shape, files[name].dtype
        if shape != slot.shape:
            misfits["shape"].append(f"{name} is {shape}, the model has {slot.shape}")
        if dtype not in slot.dtypes:
            misfits["dtype"].append(f"{name} is {dtype}, the model takes {' or '.join(map(str, slot.dtypes))}")
    missing, unexpected = targets.keys() - files.keys() - misplaced.keys(), files.keys() - targets.keys()
    if missing or unexpected or misplaced or any(misfits.values()):
        lines = [misplaced[name] for name in sorted(misplaced)]
        raise CheckpointError(folder, sorted(missing), sorted(unexpected), misplaced=lines, **misfits)


def fill(slot: Slot, name: str, stored: dict[str, StoredTensor], device: torch.device | str) -> None:
    """Brings one tensor into its parameter; makes that anew where it is none yet, of another type or elsewhere."""
    old = getattr(slot.module, slot.name)
    in_place = isinstance(slot.module, EngramTable)
    tensor = stored[name].mapped(at_random=in_place)
    tensor = tensor.view(torch.uint8) if old.dtype == torch.uint8 else tensor
    if in_place:
        setattr(slot.module, slot.name, nn.Parameter(tensor, requires_grad=False))
        return
    tensor = slot.part(tensor)
    if slot.name == "scale":
        check_scales(stored[name].file, name, tensor)
    fresh = torch.empty(0, dtype=tensor.dtype, device=device)
    if (old.dtype, old.device) != (fresh.dtype, fresh.device):
        fresh = fresh.new_empty(old.shape)
        setattr(slot.module, slot.name, nn.Parameter(fresh, requires_grad=old.requires_grad))
    slot.parameter.copy_(tensor)


def check_scales(file: Path, name: str, scales: Tensor) -> None:
    """FileUnreadable where a scale is e8m0's NaN: decoded it is an infinity, of which the clamps between the products
    of an expert make a number again. Rows of Engram's tables, which are not read here, have no clamp behind them."""
    damaged = int((scales == NO_NUMBER).sum())
    if damaged:
        raise FileUnreadable(file, problem=f"{damaged} scale(s) of {name} are no numbers")


def find_token_map(folder: Path, engram: Engram) -> tuple[Tensor | None, str]:
    """Engram's map of token ids: from our file, else from the tokenizer, else none."""
    if (folder / TOKEN_MAP).exists():
        stored = read_header(folder / TOKEN_MAP)
        if "token_map" not in stored:
            raise FileUnreadable(folder / TOKEN_MAP, problem="it has no token_map")
        return stored["token_map"].mapped(), TOKEN_MAP
    if (folder / "tokenizer.json").exists():
        ids, compressed = engram.token_map.shape[0], engram.compressed
        return read_token_map(folder / "tokenizer.json", ids, compressed), "tokenizer.json"
    return None, "ids modulo the compressed vocabulary: the folder has no tokenizer.json"


def set_token_map(model: nn.Module, token_map: Tensor) -> None:
    """Gives every Engram layer the compressed id of each token. TokenMapError if it does not fit."""
    for path, module in model.named_modules():
        if isinstance(module, Engram):
            module.set_token_map(token_map, path)


@torch.no_grad()
def save_checkpoint(model: nn.Module, folder: str | Path, shard_bytes: int | None = None) -> None:
    """Writes model.config and the weights in released layout, in one file or in shards of about `shard_bytes`.

    PartOfAModel of a rank's share, CheckpointNotWritten where the system does not let it, or of a model without values.
    """
    folder, share = Path(folder), getattr(model, "share", WHOLE)
    if share.world > 1:
        raise PartOfAModel("save_checkpoint", rank=share.rank, world=share.world)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointNotWritten(folder, problem="the model is on the meta device, where tensors hold no values")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(model, folder, shard_bytes)
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: a name that no system takes
        raise CheckpointNotWritten(folder, problem=str(error)) from None


def write_checkpoint(model: nn.Module, folder: Path, shard_bytes: int | None) -> None:
    def write(name: str, tensors: dict[str, Tensor]) -> None:
        with replacing(folder / name) as file:
            save_file(tensors, file)

    with replacing(folder / "config.json") as file:
        file.write_text(json.dumps(cast(V41Config, model.config).to_json(), indent=1))
    tensors = {name: as_stored(slot) for name, slot in slots(model).items()}
    for module in model.modules():
        if isinstance(module, Engram):
            write(TOKEN_MAP, {"token_map": module.token_map.contiguous()})
    if shard_bytes is None:
        write(WEIGHTS, tensors)
        (folder / INDEX).unlink(missing_ok=True)  # of shards that lay here before: they would be read instead
        return
    shards = list(split_by_size(tensors, shard_bytes))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write(name, shard)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    with replacing(folder / INDEX) as file:
        file.write_text(json.dumps({"weight_map": weight_map}, indent=1))


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Where to write what becomes `file` once it is whole. What it replaces lives on where a loaded model maps it."""
    beside = file.with_name(f"{file.name}.partial")
    try:
        yield beside
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def as_stored(slot: Slot) -> Tensor:
    """The parameter in the file's first type, a tensor of its own."""
    tensor = slot.parameter.detach().cpu()
    same_bits = tensor.dtype == torch.uint8
    return (tensor.view(slot.dtypes[0]) if same_bits else tensor).clone(memory_format=torch.contiguous_format)


def split_by_size(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Shards in order, each at most `limit` bytes or one tensor."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > limit:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
