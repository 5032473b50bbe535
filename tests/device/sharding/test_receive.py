"""Hidden states go from stage to stage of one process without the host and without a transfer server."""

import jax
import numpy as np
import pytest
from jax.experimental import transfer

import orca_jax
from orca_jax.sharding.device_group import DeviceGroup


@pytest.mark.parametrize("n_parts", [1, 2])
def test_each_device_copies_to_its_counterpart(n_parts: int) -> None:
    devices = jax.devices()
    before, behind = (DeviceGroup(tuple(devices[i * n_parts : (i + 1) * n_parts])) for i in range(2))
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    hidden = jax.device_put(values, before.place())
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        arrived = behind.receive(hidden)
        with pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device"):  # the guard sees that
            jax.device_put(np.asarray(hidden), behind.place())
    assert {shard.device for shard in arrived.addressable_shards} == set(behind.devices)
    for shard in arrived.addressable_shards:
        np.testing.assert_array_equal(shard.data, values)


def test_an_engine_of_two_stages_needs_no_transfer_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a transfer server was started")

    sent = 0
    receive = DeviceGroup.receive

    def from_device_to_device(group: DeviceGroup, hidden: jax.Array) -> jax.Array:
        nonlocal sent
        sent += 1
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            return receive(group, hidden)

    monkeypatch.setattr(transfer, "start_transfer_server", refuse)
    monkeypatch.setattr(DeviceGroup, "receive", from_device_to_device)
    with orca_jax.LLM(pipeline_parallel=2, n_slots=1024) as llm:
        (result,) = llm.generate(["Once"], orca_jax.SamplingParams(max_tokens=3, temperature=0))
    assert len(result.token_ids) == 3
    assert sent >= 2 * 3  # hidden states to the second stage, and tokens back to the first
