"""The text of generated kernels, held: what a change of the generator does to it shows in the diff of texts/.

After a wanted change: `python -m tests.lowering.rowwise.test_texts` writes them anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from v41.lowering.rowwise import Kernel, hold, pass_over
from v41.tools.bench.rowwise_cases import cases

TEXTS = Path(__file__).parent / "texts"
SMALL = cases(20)
WAYS = {"held": hold, "passes": pass_over}
KEPT = (  # rows alone; groups, pairs and bytes; a product in front, ranks behind; chunk by chunk
    ("collapse_norm", "held"),
    ("norm_rope_fp4", "held"),
    ("router", "held"),
    ("collapse_norm", "passes"),
)


def text_of(name: str, way: str) -> str:
    """The docstring and the kernel, without the helpers that all files share."""
    kernel: Kernel = WAYS[way](SMALL[name].body(), name)
    head, _, rest = kernel.source.partition("import triton\n")
    return head + "...\n\n\n" + rest[rest.rindex("@triton.jit") :]


def path_of(name: str, way: str) -> Path:
    return TEXTS / f"{name}_{way}.txt"


@pytest.mark.parametrize(("name", "way"), KEPT)
def test_a_kernel_has_the_text_that_is_kept(name: str, way: str) -> None:
    assert text_of(name, way) == path_of(name, way).read_text()


def test_no_text_is_kept_of_what_is_gone() -> None:
    assert {path.name for path in TEXTS.iterdir()} == {path_of(*each).name for each in KEPT}


if __name__ == "__main__":
    TEXTS.mkdir(exist_ok=True)
    for each in KEPT:
        path_of(*each).write_text(text_of(*each))
