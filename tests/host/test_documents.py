"""Documents agree with the code: folders and their purposes, files, commands, links."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, relative
from tests.places import ROOT

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)|(?:src|srcset)=\"([^\"]+)\"")
_WITHOUT_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"python -m ((?:bench|scripts|orca_jax|server)[\w.]*)")
_PATH = re.compile(r"`((?:orca_jax|server|bench|tests|scripts|docs|deploy|examples)/[\w./-]+)`")


def purpose(folder: Path) -> str:
    """The first sentence of a package's docstring."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert text, folder
    return text.splitlines()[0].rstrip(".")


def folder_rows() -> Iterator[str]:
    """The rows of docs/structure.md for the folders of the package."""
    package = ROOT / "orca_jax"
    for init in sorted(package.rglob("__init__.py")):
        if init.parent != package:
            name = init.parent.relative_to(package).as_posix()
            yield f"| `{name}/` | {purpose(init.parent)} |"


def test_every_folder_is_in_the_structure_with_its_own_words() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    missing = [row for row in folder_rows() if row not in text.splitlines()]
    assert not missing, "\n".join(missing)
    named = re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE)
    gone = [name for name in named if not (ROOT / "orca_jax" / name).is_dir()]
    assert not gone


def test_every_document_is_on_the_site() -> None:
    """The site has a page for each file of docs/, and no others but those that scripts/site makes."""
    named = set(re.findall(r": ([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert {name for name in named if not name.startswith(("reference/", "project/"))} == pages


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_files_links_and_commands_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing: list[str] = []
    for linked, anchor, image in _LINK.findall(_WITHOUT_CODE.sub("", text)):
        target = linked or image
        if target.startswith(("http://", "https://")):
            continue
        path = document.parent / target if target else document
        if not path.exists():
            missing.append(target)
        elif anchor and anchor not in anchors(path):
            missing.append(f"{target}#{anchor}")
    missing += [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
    for module in {*_MODULE.findall(text)} - {"bench.NAME"}:
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            missing.append(f"python -m {module}")
    assert not missing, missing


def anchors(path: Path) -> set[str]:
    """The headings of a Markdown file as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
