"""Regenerate the Python code of every .proto, next to it. From the repository's root:

python -m scripts.make_protos
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTOS = {
    "server/rpc/generation.proto": ("python", "pyi", "grpc_python"),
    "orca_jax/control/worker.proto": ("python", "pyi"),  # the two ends of its one method are written by hand
}


def make(into: Path) -> None:
    """Run protoc in the repository's root; it writes below `into`. Raises CalledProcessError."""
    # The path from the root makes the import in the generated code `from server.rpc import generation_pb2`.
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    for proto, kinds in PROTOS.items():
        outputs = [f"--{kind}_out={into}" for kind in kinds]
        subprocess.run([*protoc, *outputs, proto], cwd=ROOT, check=True)


if __name__ == "__main__":
    make(ROOT)
