"""Keys decoded from words are what the model decodes, for every code under every scale, by PTX and by what runs in its
place; and queries stand in the order of keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.lowering.templates.test_decode import HALVES, as_bits, as_pairs, check_same
from tests.triton_interpreter import Interpreter
from v41.lowering.templates.formats import HEAD, NUMBERS
from v41.lowering.templates.index_scores.words import NIBBLES, TEXT, asm
from v41.model_def.quantization import MXFP4_RECORD

OPS: dict[str, Callable[..., Tensor]] = {  # on registers held as int64
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "max.u32": torch.maximum,
    "mul.bf16x2": lambda a, b: as_bits(as_pairs(a) * as_pairs(b)),
}
PARTED = re.compile(r"mov.b32 \{(\$\d), (\$\d)\}, (\w+);")


def run(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the instructions of `text` leave in its registers; each element of `inputs` is a thread."""
    values, like = dict(inputs), next(iter(inputs.values()))
    for line in text.splitlines():
        if parted := PARTED.fullmatch(line):
            low, high, whole = parted.groups()
            values[low], values[high] = values[whole] & HALVES, values[whole] >> 16 & HALVES
        elif match := re.fullmatch(r"([\w.]+) (.*);", line):
            if match[1] == "{":
                continue
            out, *names = match[2].split(", ")
            read = [values[name] if name in values else torch.full_like(like, int(name, 0)) for name in names]
            values[out] = OPS[match[1]](*read)
        else:
            assert line.startswith("{ .reg") or line == "}", line
    return values


def cases() -> tuple[Tensor, Tensor]:
    """Words of every code, and of any, each under every scale byte."""
    draw = torch.Generator().manual_seed(0)
    words = torch.cat((torch.arange(16) * 0x11111111, torch.randint(0, 1 << 32, (112,), generator=draw)))
    word, scale = (each.flatten() for each in torch.meshgrid(words, torch.arange(256), indexing="ij"))
    return word, scale


def test_the_ptx_decodes_every_word_under_every_scale() -> None:
    word, scale = cases()
    found = run(asm(), {"$8": word, "$9": scale})
    packed = torch.zeros(len(word), MXFP4_RECORD.size(32), dtype=torch.uint8)
    for n in range(4):
        packed[:, n] = (word >> 8 * n & 255).to(torch.uint8)
    packed[:, -1] = scale.to(torch.uint8)
    wanted = MXFP4_RECORD.decode(packed)[:, :NIBBLES]
    for n in range(NIBBLES):
        register = f"${2 * (n % 4) + n // 4}"
        ours = as_pairs(found[register])[:, 0]
        check_same(ours, wanted[:, n])
        assert ours.isfinite().any()


KERNEL = """@triton.jit
def decode(cache, places, out, order, N: tl.constexpr, GROUPS: tl.constexpr):
    at = tl.arange(0, N)
    held, marks = words_at(cache, tl.load(places + at), N, GROUPS, False)
    channel = at[:, None] * (32 * GROUPS) + tl.arange(0, 32 * GROUPS)[None, :]
    tl.store(out + channel, keys_of(held, marks, N, GROUPS, False))
    tl.store(order + channel, ordered(tl.broadcast_to(tl.arange(0, 32 * GROUPS)[None, :], [N, 32 * GROUPS]), N, GROUPS))
"""


@pytest.mark.parametrize("groups", (1, 2, 4))
def test_records_of_any_width_are_decoded_where_they_lie(interpreter: Interpreter, tmp_path: Path, groups: int) -> None:
    file = tmp_path / "decode.py"
    file.write_text("\n\n".join([HEAD, TEXT, KERNEL]))
    draw = torch.Generator().manual_seed(groups)
    width, count = 32 * groups, 256
    records = torch.randint(0, 256, (count, 17 * groups), generator=draw).to(torch.uint8)
    records[:, -groups:] = torch.arange(count).to(torch.uint8)[:, None] + torch.arange(groups).to(torch.uint8) * 60
    places = torch.randperm(count, generator=draw).to(torch.int32)
    out, order = torch.empty(count, width, dtype=torch.bfloat16), torch.empty(count, width, dtype=torch.int32)
    sent = records.view(NUMBERS[groups]), places, out, order
    *_, out, order = interpreter.launch(file, "decode", (1,), *sent, N=count, GROUPS=groups)
    wanted = MXFP4_RECORD.decode(records)[places.long()]
    assert torch.equal(order[0].sort().values, torch.arange(width, dtype=torch.int32))
    check_same(out, wanted.gather(1, order.long()))
    assert order[0, :8].tolist() == [0, 4, 8, 12, 16, 20, 24, 28], "neighbours in pairs, a word a thread"
