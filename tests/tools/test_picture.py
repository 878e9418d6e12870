"""The picture of a report shows its lines, and nothing in it comes from the network."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.conftest import ROOT
from tests.tools.small_models import run_of_balanced
from v41.tools.picture import picture


def text_of(svg: str) -> str:
    """What is to be read, as lines."""
    lines = [each.text or "" for each in ElementTree.fromstring(svg).iter() if each.tag.endswith("}text")]
    return "\n".join(lines).replace("\xa0", " ")


def test_a_picture_shows_the_report_and_fetches_nothing() -> None:
    made = picture(run_of_balanced(), "v41 inspect run/")
    told = text_of(made)
    assert "fold_sinkhorn" in told and "pieces" in told and "v41 inspect run/" in told
    assert {*re.findall(r"https?://[^\"\s]+", made)} <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", made)
    assert picture(run_of_balanced(), "v41 inspect run/") == made
    short = text_of(picture(run_of_balanced(), "v41 inspect run/", 3))
    assert re.search(r"\.\.\. and \d+ lines more", short) and "fold_sinkhorn" not in short


def test_the_picture_of_the_readme_is_there() -> None:
    (name,) = re.findall(r"!\[[^\]]+\]\((docs/\S+\.svg)\)", (ROOT / "README.md").read_text())
    assert "layer" in text_of((ROOT / name).read_text())
