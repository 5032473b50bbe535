"""The arguments that a manifest's shell passes to `orca`, found by running it."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def orca_arguments(command: Sequence[str], variables: Mapping[str, str], tmp_path: Path) -> list[str]:
    """The arguments with which `command` runs `orca`, which must replace the shell (`exec`)."""
    orca = tmp_path / "orca"
    orca.write_text('#!/bin/sh\necho "as $$" >&2\nprintf "%s\\n" "$@"\n')
    orca.chmod(0o755)
    shell = subprocess.Popen(
        list(command),
        env={**variables, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = shell.communicate(timeout=30)
    assert shell.returncode == 0, err
    assert err == f"as {shell.pid}\n", "it is not the shell's process, and would hear of no SIGTERM"
    return out.splitlines()
