"""models: what a bench of whole models runs on, as its arguments ask: a preset, or four layers of it, and a device."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from v41.errors import BenchNeedsGPU, ContextBeyondModel
from v41.model_def.buckets import Buckets
from v41.model_def.config import V41Config
from v41.model_def.model import V41ForCausalLM
from v41.tools.bench import timing
from v41.tools.bench.program_cases import cut
from v41.tools.drawn_model import drawn_model
from v41.tools.steps import check_decode


def device_of(arguments: Namespace, command: str, on_cpu: str = "tries all but the times") -> str:
    """The device asked for, which must be there. on_cpu: what `command` does on a CPU."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise BenchNeedsGPU(command, found=f"torch sees none; --device cpu {on_cpu}")
    return str(arguments.device)


def config_of(arguments: Namespace) -> V41Config:
    """That of --preset, --cut or not. RowsBeyondBuckets for more rows than a decode step is captured with,
    ContextBeyondModel for more tokens than a request can have, before weights of gigabytes are drawn."""
    config, command = V41Config.preset(arguments.preset), f"v41 bench {arguments.case}"
    asked = vars(arguments)  # a prompt has no rows that decode
    rows, context, most = asked.get("rows", []), asked.get("context", 0), config.max_position_embeddings
    context = max(context) if isinstance(context, list) else context
    check_decode(f"{command} --rows", max(rows, default=0) if isinstance(rows, list) else rows, Buckets().whole)
    if context > most:
        raise ContextBeyondModel(f"{command} --context", context=context, most=most)
    return cut(config) if arguments.cut else config


def model_of(config: V41Config, arguments: Namespace) -> V41ForCausalLM:
    """As it is drawn (drawn_model.py), on the device asked for. ModelBeyondMemory."""
    return drawn_model(config, str(arguments.device), f"v41 bench {arguments.case}")


def facts_of(case: str, arguments: Namespace, config: V41Config) -> dict[str, Any]:
    """How the JSON of a bench begins: which case, where, when, of which model."""
    name = f"preset {arguments.preset}{', cut' if arguments.cut else ''}"
    return {"case": case, **timing.provenance(), "model": name, "layers": config.num_hidden_layers}
