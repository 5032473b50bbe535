"""The devices that each stage's process sees, against tables written by hand."""

import pytest

from orca_jax.config import ParallelConfig
from orca_jax.errors import ConfigError
from orca_jax.workers.environment import held_fraction, hold_memory, visible_gpus, worker_environment

FOUR = ("nvidia0", "nvidia1", "nvidia2", "nvidia3")
VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
COUNT = "--xla_force_host_platform_device_count"
SAID = {"PYTHONUNBUFFERED": "1"}
WHOLE = {SHARE: "0.9"}


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        # what /dev holds
        ({}, (), ()),
        ({}, ("null", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps", "nvidia-modeset"), ()),
        ({}, ("nvidia1", "nvidia0", "nvidiactl"), ("0", "1")),
        ({}, ("/dev/nvidia0", "/dev/nvidia-caps", "/dev/nvidia-caps/nvidia-cap1"), ("0",)),
        ({}, ("nvidia5", "nvidia7"), ("0", "1")),  # a container's own: CUDA counts from 0
        ({}, ("nvidia0", "nvidia10"), ("0", "1")),
        # what CUDA_VISIBLE_DEVICES names
        ({VISIBLE: "2,0"}, FOUR, ("2", "0")),
        ({VISIBLE: " 1 , 3 "}, FOUR, ("1", "3")),
        ({VISIBLE: "03"}, FOUR, ("3",)),
        ({VISIBLE: "2"}, (), ("2",)),
        ({VISIBLE: "GPU-8932f937,MIG-5c89"}, FOUR, ("GPU-8932f937", "MIG-5c89")),
        ({VISIBLE: ""}, FOUR, ()),
        ({VISIBLE: "-1"}, FOUR, ()),
        ({VISIBLE: "NoDevFiles"}, FOUR, ()),
        ({VISIBLE: "1,-1,2"}, FOUR, ("1",)),
        ({VISIBLE: "1,4,2"}, FOUR, ("1",)),
        ({VISIBLE: "1,two,2"}, FOUR, ("1",)),
        ({VISIBLE: "1,,2"}, FOUR, ("1",)),
        ({VISIBLE: "0,1,00"}, FOUR, ()),
        # a CPU was asked for
        ({"JAX_PLATFORMS": "cpu"}, FOUR, ()),
        ({"JAX_PLATFORMS": " cpu,"}, FOUR, ()),
        ({"JAX_PLATFORMS": "cpu", VISIBLE: "0"}, FOUR, ()),
        ({"JAX_PLATFORMS": ""}, ("nvidia0",), ("0",)),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ("nvidia0",), ("0",)),
    ],
)
def test_visible_gpus_follow_the_variables_and_devices(
    environ: dict[str, str], files: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert visible_gpus(environ, files) == expected


@pytest.mark.parametrize(
    ("n_stages", "tensor_parallel", "environ", "gpus", "expected"),
    [
        # enough for all
        (1, 1, {}, ("3",), [{VISIBLE: "3", **WHOLE}]),
        (2, 1, {}, ("2", "0", "1"), [{VISIBLE: "2", **WHOLE}, {VISIBLE: "0", **WHOLE}]),
        (2, 2, {}, ("0", "1", "2", "3"), [{VISIBLE: "0,1", **WHOLE}, {VISIBLE: "2,3", **WHOLE}]),
        (
            *(2, 1, {VISIBLE: "GPU-a,GPU-b"}, ("GPU-a", "GPU-b")),
            [{VISIBLE: "GPU-a", **WHOLE}, {VISIBLE: "GPU-b", **WHOLE}],
        ),
        (
            1,
            2,
            {"XLA_FLAGS": f"{COUNT}=8"},
            ("0", "1"),
            [{"XLA_FLAGS": f"{COUNT}=8", VISIBLE: "0,1", **WHOLE}],
        ),
        # shared
        (2, 1, {}, ("5",), [{VISIBLE: "5", SHARE: "0.45"}] * 2),
        (3, 1, {}, ("0",), [{VISIBLE: "0", SHARE: "0.3"}] * 3),
        (3, 1, {}, ("0", "1"), [*[{VISIBLE: "0", SHARE: "0.45"}] * 2, {VISIBLE: "1", **WHOLE}]),
        (4, 1, {}, ("0", "1"), [*[{VISIBLE: "0", SHARE: "0.45"}] * 2, *[{VISIBLE: "1", SHARE: "0.45"}] * 2]),
        (2, 1, {SHARE: "0.2"}, ("0",), [{VISIBLE: "0", SHARE: "0.2"}] * 2),
        (
            *(2, 1, {"XLA_CLIENT_MEM_FRACTION": "0.2"}, ("0",)),
            [{VISIBLE: "0", "XLA_CLIENT_MEM_FRACTION": "0.2"}] * 2,
        ),
        # a CPU
        (2, 1, {}, (), [{}, {}]),
        (2, 1, {"XLA_FLAGS": "--xla_dump_to=/x"}, (), [{"XLA_FLAGS": "--xla_dump_to=/x"}] * 2),
        (2, 1, {"XLA_FLAGS": f"{COUNT}=16"}, (), [{"XLA_FLAGS": f"{COUNT}=1"}] * 2),
        (1, 4, {}, (), [{"XLA_FLAGS": f"{COUNT}=4"}]),
        (1, 2, {"XLA_FLAGS": ""}, (), [{"XLA_FLAGS": f"{COUNT}=2"}]),
        (1, 2, {"XLA_FLAGS": f"--a=1 {COUNT}=16  --b=2"}, (), [{"XLA_FLAGS": f"--a=1  --b=2 {COUNT}=2"}]),
        (1, 2, {"XLA_FLAGS": f"{COUNT}=4 {COUNT}=1 --a=1"}, (), [{"XLA_FLAGS": f"--a=1 {COUNT}=2"}]),
        (1, 2, {"JAX_NUM_CPU_DEVICES": "8"}, (), [{"JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": f"{COUNT}=2"}]),
    ],
)
def test_each_stage_sees_its_own_gpus(
    n_stages: int,
    tensor_parallel: int,
    environ: dict[str, str],
    gpus: tuple[str, ...],
    expected: list[dict[str, str]],
) -> None:
    given = {"HOME": "/home/orca", **environ}
    before = dict(given)
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor_parallel)
    made = [worker_environment(stage, parallel, given, gpus) for stage in range(n_stages)]
    assert made == [{"HOME": "/home/orca", **SAID, **one} for one in expected]
    assert given == before


@pytest.mark.parametrize("gpus", [("0",), ("0", "1", "4")])
def test_stages_of_several_gpus_do_not_share(gpus: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        worker_environment(1, ParallelConfig(pipeline_parallel=2, tensor_parallel=2), {}, gpus)
    message = str(raised.value)
    assert "2 stages of 2 GPUs each need 4" in message
    assert f"only {len(gpus)} are visible: {','.join(gpus)};" in message


@pytest.mark.parametrize(
    ("environ", "gpus", "expected"),
    [
        ({}, ("0", "1"), {SHARE: "0.5"}),
        ({}, ("0",), {SHARE: "0.25"}),
        ({SHARE: "0.8"}, ("0",), {SHARE: "0.8"}),
        ({}, (), {}),
    ],
)
def test_a_fraction_of_the_memory_is_for_all_stages_on_a_gpu(
    environ: dict[str, str], gpus: tuple[str, ...], expected: dict[str, str]
) -> None:
    parallel = ParallelConfig(pipeline_parallel=2)
    made = worker_environment(0, parallel, environ, gpus, memory_fraction=0.5)
    assert {name: made[name] for name in made if "MEM_FRACTION" in name} == expected


def test_jax_reserves_the_configured_memory_once() -> None:
    environ: dict[str, str] = {}
    assert held_fraction(environ) == 0.75
    hold_memory(environ, 0.9)
    hold_memory(environ, 0.5)
    assert held_fraction(environ) == 0.9
    variables = {"XLA_CLIENT_MEM_FRACTION": ".6"}
    hold_memory(variables, 0.9)
    assert (variables, held_fraction(variables)) == ({"XLA_CLIENT_MEM_FRACTION": ".6"}, 0.6)
    assert held_fraction({SHARE: "much"}) is None and held_fraction({SHARE: "1.5"}) is None
