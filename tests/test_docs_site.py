"""The checks of ``make docs`` that the hook adds to MkDocs's own."""

import json
from pathlib import Path

import docs_site
import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]


def test_every_public_name_is_on_a_page():
    assert not docs_site.undocumented(PAGES)


def test_a_page_has_at_most_1500_words():
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in DOCS.glob("*.md")}
    assert {name: number for name, number in words.items() if number > 1500} == {}


@pytest.mark.parametrize("path", sorted(DOCS.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_the_demo_has_the_same_result_in_every_text():
    texts = [DOCS.parent / "README.md", DOCS / "start.md", DOCS.parent / "recipes" / "tiny_shapes.yaml"]
    assert all("0.96 or more" in path.read_text(encoding="utf-8") for path in texts)
