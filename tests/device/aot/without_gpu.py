"""Helps tests that compile for absent GPUs: they need the CUDA plugin, and run in separate processes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.places import ROOT

_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")

needs_plugin = pytest.mark.skipif(
    not any(map(find_spec, _PLUGINS)), reason=f"none of {', '.join(_PLUGINS)} is installed (the extra cuda)"
)


def run_without_gpu(*arguments: str) -> Any:
    """Run Python with these arguments in a process that sees no GPU; its last output line, parsed as JSON."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
