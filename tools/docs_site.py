"""MkDocs hook of the documentation site (``mkdocs.yml``).

The pages are the files of ``docs/`` as GitHub shows them. The hook adds the files outside of ``docs/`` that they link
to and lays out the package for mkdocstrings. It warns of a public name that no reference page documents, and of a page
that asks another host for anything; ``make docs`` makes warnings errors.
"""

from __future__ import annotations

import ast
import logging
import re
import shutil
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import lit_vgrpo

if TYPE_CHECKING:  # so that the checks can be tested where the extra `docs` is not installed
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = ("callbacks", "objectives", "policies", "rewards")
SOURCES = ROOT / "build" / "docs_sources"
"""The package's text, without the roles of docstrings."""
PACKAGES = {f"lit_vgrpo.{name}": ROOT / "lit_vgrpo" / name for name in DOCUMENTED}
ALSO_PAGES = {"CONTRIBUTING.md"}
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(?:~[\w.]*\.)?([^`]+)`")
"""A reference as docstrings write it, which Markdown would show with its colons."""
LOADS_ELSEWHERE = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\ssrc="?(?:https?:)?//[^">]*|<link\b[^>]*\shref="?https?://[^">]*\.css'
)

log = logging.getLogger("mkdocs.hooks.docs_site")


def on_startup(command: str, dirty: bool) -> None:
    """Write the package's text to where ``mkdocs.yml`` lets mkdocstrings read it, which must exist from the start."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    for name in glob("lit_vgrpo/**/*.py", root_dir=ROOT, recursive=True):
        (SOURCES / name).parent.mkdir(parents=True, exist_ok=True)
        (SOURCES / name).write_text(ROLE.sub(r"`\1`", (ROOT / name).read_text()))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of ``docs/``; a link to nothing stays one, for MkDocs to report."""
    from mkdocs.structure.files import File

    pages = list(files.documentation_pages())
    outside = {path for page in pages for path in link_outside(page.src_uri).findall(page.content_string)} | ALSO_PAGES
    for path in sorted(outside):
        if (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for name in sorted(undocumented(page.content_string for page in pages)):
        log.warning(f"{name} is public, but no page of docs/reference/ documents it: add the line '::: {name}'")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside of ``docs/`` to the copies that the site has of them."""
    return link_outside(page.file.src_uri).sub(r"\1", markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of a page that would load something from another host."""
    for tag in LOADS_ELSEWHERE.findall(output):
        log.warning(f"{page.file.src_uri} would load from another host: {tag}")
    return output


def link_outside(page: str) -> re.Pattern[str]:
    """Return what finds links to files outside of ``docs/``, such as ``](../recipes/x.yaml)``.

    Its group is the path from the repository's root.

    Args:
        page: the page's path in ``docs/``, which tells how many ``../`` still stay inside.
    """
    return re.compile(rf"(?<=\]\((?:\.\./){{{page.count('/')}}})\.\./([^)#\s]+)")


def undocumented(pages: Iterable[str]) -> set[str]:
    """Return the public names that no page documents.

    Args:
        pages: texts, in which a line such as ``::: lit_vgrpo.objectives.VGRPO`` documents that class.
    """
    documented = {name for text in pages for name in re.findall(r"(?m)^::: (\S+)$", text)}
    names = {f"{package}.{name}" for package, folder in PACKAGES.items() for name in all_of(folder / "__init__.py")}
    last_parts = {path.rpartition(".")[2] for path in documented} | {"__version__"}
    return names - documented | {f"lit_vgrpo.{name}" for name in lit_vgrpo.__all__ if name not in last_parts}


def all_of(path: Path) -> list[str]:
    """Return a module's ``__all__``, read without importing it.

    Raises:
        ValueError: there is none.
    """
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{path} has no __all__")
