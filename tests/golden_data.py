"""The golden data: a small model in released layout, and what DeepSeek's reference forward computed with it.

Found next to the repository, or at $V41_GOLDEN; tests that need it skip where it is absent.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from v41.model_def.config import V41Config

ROOT = Path(os.environ.get("V41_GOLDEN") or Path(__file__).resolve().parents[2] / "shared" / "golden")
FOLDER = ROOT if (ROOT / "reference.safetensors").exists() else ROOT / "small_a"


@dataclass(frozen=True)
class Golden:
    folder: Path
    config: V41Config
    weights: dict[str, Tensor]  # released names
    reference: dict[str, Tensor]  # inputs and outputs, as the data's README names them
    meta: dict[str, float]

    def __call__(self, name: str) -> Tensor:
        """A reference tensor without the batch dimension of 1 that most have in front."""
        tensor = self.reference[name]
        return tensor[0] if (tensor.ndim > 2 and tensor.shape[0] == 1) or name == "ids" else tensor


@cache
def read(folder: Path) -> Golden:
    return Golden(folder, V41Config.from_json(folder), load_file(folder / "model.safetensors"),
                  load_file(folder / "reference.safetensors"), json.loads((folder / "meta.json").read_text()))


@pytest.fixture(scope="session")
def golden() -> Golden:
    if not (FOLDER / "reference.safetensors").exists():
        pytest.skip("no golden data in ../shared/golden; V41_GOLDEN names another folder")
    return read(FOLDER)
