"""Paths for tests: the repository's root, and folders that tests of several rooms read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
CERTIFICATES = ROOT / "tests" / "endpoint" / "data"
