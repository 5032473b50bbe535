"""Large buffers are kept by the C library, so that their pages do not fault at every call."""

import ctypes
import subprocess
import sys

import pytest

from orca_jax import host_memory

FAULTS = """
import ctypes, resource, sys
from orca_jax.host_memory import keep_large_buffers
if sys.argv[1] == "keep":
    assert keep_large_buffers()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)

def touch():
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not glibc")
def test_a_large_block_is_there_again_without_a_page_fault() -> None:
    assert page_faults("keep") < 100
    assert page_faults("as it is") > 100  # else the test shows nothing


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: object())
    assert not host_memory.keep_large_buffers()
