"""`kv_transfer_params` as vLLM, its proxies and llm-d write them, and leases that nobody else can make."""

import json
from dataclasses import replace
from typing import Any

import pytest

from orca_jax.errors import InvalidSchedulingParameter
from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts

# What vLLM's proxies send to the server that computes the prompt (vllm/tests/v1/kv_connector/
# nixl_integration/toy_proxy_server.py), and what they pass on (unit/utils.py, and with newer fields
# nixl/pull_scheduler.py).
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TO_DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "my-engine-id",
    "remote_request_id": "prefill-7",
    "remote_block_ids": [0, 1, 2],
    "remote_host": "my-host",
    "remote_port": 1234,
    "tp_size": 1,
}
NEWER = TO_DECODE | {
    "remote_block_ids": [[0, 1, 2]],
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 48,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}


def test_the_fields_are_those_of_vllm() -> None:
    assert KVTransferParams.read(TO_PREFILL) == KVTransferParams(do_remote_decode=True)
    expected = KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id="my-engine-id",
        remote_request_id="prefill-7",
        remote_block_ids=(0, 1, 2),
        remote_host="my-host",
        remote_port=1234,
    )
    assert KVTransferParams.read(TO_DECODE) == KVTransferParams.read(NEWER) == expected
    assert json.loads(json.dumps(expected.as_dict())) == TO_DECODE
    assert KVTransferParams.read({"a router's": 7}) == KVTransferParams.read({}) == KVTransferParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_remote_decode", 1),
        ("do_remote_decode", True),
        ("remote_engine_id", 7),
        ("remote_request_id", "x" * 257),
        ("remote_host", ["a"]),
        ("first_token_id", -1),
        ("first_token_id", True),
        ("first_token_proof", 7),
        ("remote_port", 0),
        ("remote_port", True),
        ("remote_port", 1 << 16),
        ("remote_block_ids", 7),
        ("remote_block_ids", [1, "2"]),
        ("remote_block_ids", [[1.5]]),
        ("remote_block_ids", [0] * ((1 << 20) + 1)),
    ],
)
def test_other_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidSchedulingParameter, match=f"kv_transfer_params.{name} is .*; it must be") as e:
        KVTransferParams.read(TO_DECODE | {name: value})
    assert e.value.param == f"kv_transfer_params.{name}" and len(str(e.value)) < 300


def test_only_a_server_with_the_secret_writes_params_that_are_trusted() -> None:
    facts = TransferFacts("model", "a secret")
    params = facts.new_lease(engine_id="e", host="10.0.0.1", port=7, n_blocks=3)
    assert params.remote_block_ids == (0, 1, 2) and facts.trusts(params)
    assert TransferFacts("another model", "a secret").trusts(params), "the digest tells models apart"
    assert KVTransferParams.read(json.loads(json.dumps(params.as_dict()))) == params
    assert not TransferFacts("model", "another").trusts(params)
    for other in (
        {"remote_host": "10.0.0.2"},
        {"remote_port": 8},
        {"remote_block_ids": (0, 1)},
        {"remote_request_id": "x" + params.remote_request_id},
        {"remote_request_id": ""},
        {"remote_request_id": "\udc80.\udc80"},
        {"do_remote_prefill": False},
    ):
        assert not facts.trusts(replace(params, **other))
    assert params != facts.new_lease(engine_id="e", host="10.0.0.1", port=7, n_blocks=3)


def test_without_a_secret_only_this_machine_is_trusted() -> None:
    facts = TransferFacts("model", "")
    for host, trusted in (("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False)):
        assert facts.trusts(facts.new_lease(engine_id="", host=host, port=7, n_blocks=3)) == trusted


def test_a_digest_tells_apart_all_that_blocks_depend_on() -> None:
    digests = [
        TransferFacts(model, "").digest(tokens, salt)
        for model in ("a", "b")
        for tokens in ((1, 2), (1, 3), (1,), (1, 2, 0))
        for salt in (("", ""), ("key", ""), ("", "key"), ("ke", "y"))
    ]
    assert len(set(digests)) == len(digests)


def test_a_first_token_is_for_its_prompt_owner_and_model_alone() -> None:
    facts, prompt, salt = TransferFacts("model", "secret"), [1, 2, 3], ("key", "")
    lease = facts.new_lease(engine_id="e", host="a", port=7, n_blocks=1)
    params = facts.with_first_token(lease, 9, prompt, salt)
    sent = KVTransferParams.read(json.loads(json.dumps(params.as_dict())))
    assert facts.first_token(sent, prompt, salt) == 9
    assert facts.first_token(lease, prompt, salt) is None and "first_token_id" not in lease.as_dict()
    assert facts.first_token(sent, [1, 2, 4], salt) is None
    assert facts.first_token(sent, prompt, ("another key", "")) is None
    assert facts.first_token(replace(sent, first_token_id=8), prompt, salt) is None
    assert facts.first_token(replace(sent, first_token_proof=""), prompt, salt) is None
    assert TransferFacts("another model", "secret").first_token(sent, prompt, salt) is None
    assert TransferFacts("model", "another secret").first_token(sent, prompt, salt) is None
