"""Vendored libraries are unchanged and have their licences."""

import hashlib
import re

from server.http.pages import page_files
from tests.places import ROOT

FOLDER = ROOT / "server/web/static/vendor"
ROW = re.compile(r"^\| `(?P<file>[^`]+)` \|(?P<about>.*)\| `(?P<sha256>[0-9a-f]{64})` \|$", re.MULTILINE)
WRITTEN_HERE = {"README.md", "LICENSES.txt"}


def test_each_file_is_the_published_one() -> None:
    rows = {row["file"]: row for row in ROW.finditer((FOLDER / "README.md").read_text(encoding="utf-8"))}
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert files == rows.keys() | WRITTEN_HERE and rows
    for name, row in rows.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == row["sha256"], name


def test_the_licences_of_all_that_is_bundled_are_served() -> None:
    licences = page_files()["vendor/LICENSES.txt"].content.decode("utf-8")
    for row in ROW.finditer((FOLDER / "README.md").read_text(encoding="utf-8")):
        library, _, bundled = row["about"].split("|")[0].strip().rstrip(")").partition(" (bundles ")
        for name in (library, *bundled.split(", ")):
            assert re.search(rf"^==== {re.escape(name)} \d", licences, re.MULTILINE), name
    assert licences.count("Copyright (c)") + licences.count("Copyright Mathias") >= 6
