"""The checks of ``make docs`` that the hook adds to MkDocs's own."""

import json
from pathlib import Path

import docs_site
import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]


def test_every_public_name_is_on_a_page():
    assert not docs_site.undocumented(PAGES)


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("::: lit_vgrpo.callbacks.EMA", {"lit_vgrpo.callbacks.EMA"}),
        ("::: lit_vgrpo.objectives.EPG", {"lit_vgrpo.objectives.EPG", "lit_vgrpo.EPG"}),
        ("::: lit_vgrpo.module.VGRPOModule", {"lit_vgrpo.VGRPOModule"}),
    ],
)
def test_a_missing_name_is_found(line, missing):
    assert docs_site.undocumented(page.replace(f"{line}\n", "") for page in PAGES) == missing


@pytest.mark.parametrize(
    ("page", "link", "outside"),
    [
        ("results.md", "[x](../benchmarks/results/sweep.md#a)", ["benchmarks/results/sweep.md"]),
        ("reference/rewards.md", "[x](../rewards.md)", []),
    ],
)
def test_links_that_leave_the_folder_are_found(page, link, outside):
    assert docs_site.link_outside(page).findall(link) == outside


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="https://example.org/a.js"></script>', True),
        ('<img src="//example.org/a.png">', True),
        ('<a href="https://example.org/">a link</a><img src="assets/a.png">', False),
    ],
)
def test_what_another_host_would_be_asked_for_is_found(html, loads):
    assert bool(docs_site.LOADS_ELSEWHERE.findall(html)) is loads


@pytest.mark.parametrize("path", sorted(DOCS.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
