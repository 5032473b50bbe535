"""Pack the JSON Schema Test Suite into the file that the tests read. From a checkout of its repository:

git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite suite
python -m scripts.make_json_schema_suite suite
"""

import argparse
import gzip
import json
import subprocess
from pathlib import Path

PACKED = Path(__file__).resolve().parents[1] / "tests" / "data" / "json_schema_test_suite.json.gz"
DRAFTS = ("draft2020-12", "draft7")


def pack(suite: Path, commit: str) -> bytes:
    """The cases of both drafts by file, with the licence; the same bytes for the same suite."""
    tests = suite / "tests"
    files = sorted(path for draft in DRAFTS for path in (tests / draft).rglob("*.json"))
    packed = {
        "origin": "https://github.com/json-schema-org/JSON-Schema-Test-Suite",
        "commit": commit,
        "licence": (suite / "LICENSE").read_text(),
        "files": {path.relative_to(tests).as_posix(): json.loads(path.read_text()) for path in files},
    }
    text = json.dumps(packed, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(), 9, mtime=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path)
    checkout = parser.parse_args().suite
    git = ["git", "-C", checkout, "rev-parse", "HEAD"]
    head = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    PACKED.write_bytes(pack(checkout, head))
