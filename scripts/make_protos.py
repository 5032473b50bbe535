"""Make the Python of server/rpc/generation.proto again, beside it. From the repository's root:

python -m scripts.make_protos
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = "server/rpc/generation.proto"


def make(into: Path) -> None:
    """Run protoc in the repository's root; the files land in `into`/server/rpc. Raises CalledProcessError."""
    outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    # The path from the root makes the import in the generated code `from server.rpc import generation_pb2`.
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    subprocess.run([*protoc, *outputs, PROTO], cwd=ROOT, check=True)


if __name__ == "__main__":
    make(ROOT)
