"""Compiling stays short: kernels are compiled once for all layers, and ptxas is queried once."""

import argparse
from types import SimpleNamespace

import pytest
from jax.experimental.mosaic.gpu import fragmented_array

from bench.compiled.compile_time import Figures, figures
from orca_jax.execution.programs import ask_ptxas_once
from tests.device.aot.without_gpu import needs_plugin, run_without_gpu

# Counts the calls while a forward program is lowered, with the kernel in it.
COUNT = """
from dataclasses import replace
from jax.experimental.mosaic.gpu import fragmented_array
extension, n = fragmented_array.mgpu_lib._mosaic_gpu_ext, 0
ask = extension._get_ptxas_isa_version
def counted():
    global n
    n += 1
    return ask()
extension._get_ptxas_isa_version = counted
from bench.compiled.compile_for_gpu import compile_forward
from orca_jax.families.presets import PRESETS
compile_forward(replace(PRESETS["gpt3-13b"], layers=PRESETS["gpt3-13b"].layers[:1]), 32, 32)
print(n)
"""


def compiled(n_layers: int) -> Figures:
    """GPT-3 13B with this many layers, for 32 tokens."""
    flags = argparse.Namespace(model="gpt3-13b", layers=n_layers, max_batch_size=32, layers_a_program=0)
    return figures(flags, 32)


def test_ptxas_is_queried_for_its_version_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def ask() -> int:
        asked.append(90)
        return 90

    library = SimpleNamespace(_mosaic_gpu_ext=SimpleNamespace(_get_ptxas_isa_version=ask))
    monkeypatch.setattr(fragmented_array, "mgpu_lib", library)
    ask_ptxas_once()
    ask_ptxas_once()
    assert [library._mosaic_gpu_ext._get_ptxas_isa_version() for _ in range(3)] == [90] * 3
    assert len(asked) == 1


def test_without_mosaics_compiler_nothing_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (None, SimpleNamespace(), SimpleNamespace(_mosaic_gpu_ext=SimpleNamespace())):
        monkeypatch.setattr(fragmented_array, "mgpu_lib", library)
        ask_ptxas_once()


@needs_plugin
def test_lowering_a_forward_program_queries_ptxas_once() -> None:
    assert run_without_gpu("-c", COUNT) == 1


@needs_plugin
def test_more_layers_need_no_more_kernels() -> None:
    few, more = compiled(3), compiled(9)
    assert 10 <= few.kernels == more.kernels <= 30  # 94 where XLA keeps the calls of a layer apart
    # Each layer holds the attention kernel's text, 0.35 MB of it.
    assert more.program - few.program < 6 * 500_000
    assert more.temporaries - few.temporaries < 10_000
