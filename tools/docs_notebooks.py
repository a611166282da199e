"""MkDocs hook that executes the notebooks of ``docs/notebooks/`` and shows them as pages, in the site's own style.

They are kept without outputs, so that a change of one is a change of its text. A cell that fails stops the build.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
TIMEOUT_S = 300


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page, and its pictures, for every notebook; the notebook itself stays, to be downloaded."""
    from mkdocs.structure.files import File

    for path in sorted(FOLDER.glob("*.ipynb")):
        page, pictures = rendered(path.stem, path.read_text(encoding="utf-8"))
        head = f"[Download this notebook]({path.name}).\n\n"
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=head + page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to notebooks, which GitHub shows itself, to their pages."""
    return re.sub(r"(\(notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)


@cache
def rendered(name: str, text: str) -> tuple[str, dict[str, bytes]]:
    """Execute a notebook; return it as Markdown, and its pictures by name.

    Raises:
        CellExecutionError: a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter

    notebook: Any = nbformat.reads(text, as_version=4)
    client = NotebookClient(notebook, timeout=TIMEOUT_S, startup_timeout=TIMEOUT_S, coalesce_streams=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for `lightning` in %%bash
    client.execute(cwd=str(FOLDER), env={**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore"})
    for cell in notebook.cells:
        is_python = cell.cell_type == "code" and not cell.source.startswith("%%bash")
        if is_python:  # without what libraries log, and their bars of loading
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    page, found = MarkdownExporter().from_notebook_node(
        notebook, resources={"unique_key": name, "output_files_dir": "images"}
    )
    return page.replace("%%bash\n", ""), found["outputs"]
