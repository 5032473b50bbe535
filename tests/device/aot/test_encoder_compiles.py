"""A T5's programs compiled for an H200 that need not be present; skipped without the CUDA plugin."""

from typing import Any

import pytest

from tests.device.aot.encoder_programs import copies_of_kept
from tests.device.aot.without_gpu import needs_plugin, run_without_gpu


@needs_plugin
def test_no_program_copies_weights_or_caches_or_waits_for_the_host() -> None:
    found: dict[str, Any] = run_without_gpu("-m", "tests.device.aot.encoder_programs")
    assert found["attention"].startswith("pure JAX, static shapes"), found["attention"]
    for name, program in found["programs"].items():
        assert program["copies"] == [], name
        assert program["loops led by the host"] == 0, name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("  %copy.1 = bf16[512,512]{1,0} copy(%p)", ["bf16[512,512]"]),
        ("  ROOT %t = f32[8,512,64]{2,1,0} transpose(%p), dimensions={0,2,1}", ["f32[8,512,64]"]),
        ("  %copy.3 = bf16[1000,8,16,64]{3,2,1,0} copy(%p)", ["bf16[1000,8,16,64]"]),
        ("  %copy.2 = bf16[64,512]{1,0} copy(%p)", []),
        ("  %add = bf16[512,512]{1,0} add(%p, %q)", []),
    ],
)
def test_copies_of_a_matrix_s_size_are_found(line: str, expected: list[str]) -> None:
    assert copies_of_kept(line) == expected
