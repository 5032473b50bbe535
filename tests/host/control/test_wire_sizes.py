"""The bytes on the wire in docs/workers.md agree with the code."""

import re
from typing import Any

import numpy as np

from orca_jax.control.frame import (
    DONE,
    MAX_EPOCH,
    MESSAGE,
    PASSED,
    READY,
    RECEIVED,
    TOKENS,
    TROUBLE,
    Frame,
    FrameKind,
    StageTime,
    encode_frame,
    encode_stage_time,
)
from orca_jax.control.message_wire import encode_message
from orca_jax.control.sampled_wire import encode_sampled, expected_records
from orca_jax.control.worker_pb2 import Iteration
from orca_jax.iteration.message import ControlMessage
from orca_jax.iteration.shape import EngineShape
from orca_jax.request.sampled import Sampled
from tests.host.control.test_message_wire import ONE, message_of
from tests.places import ROOT

MOST = 2**64 - 1
LAST_STAGE = 255  # of 256
SMALL = EngineShape(
    block_size=4, max_blocks=8, max_rows=64, max_tokens=1 << 14, n_rows=64, n_blocks=1 << 16, vocab_size=300
)
LARGE = EngineShape(
    block_size=4, max_blocks=8, max_rows=64, max_tokens=1 << 14, n_rows=64, n_blocks=1 << 17, vocab_size=300
)


def size(kind: FrameKind, payload: Any = None, *, stage: int = LAST_STAGE) -> int:
    """Bytes of a frame with the largest possible epoch, iteration and stage."""
    return len(encode_frame(Frame(kind, MAX_EPOCH - 1, MOST, stage, payload)))


def message_size(message: ControlMessage, shape: EngineShape = SMALL) -> int:
    return size(MESSAGE, encode_message(message, shape), stage=0)


def decodes(n: int) -> ControlMessage:
    """Rows of two blocks in use and one input token."""
    return message_of([ONE] * n)


def numbers(pattern: str) -> list[int]:
    """The numbers in the only match of the pattern in the document; line ends count as spaces."""
    text = " ".join((ROOT / "docs" / "workers.md").read_text("utf-8").split())
    result = re.findall(pattern, text)
    assert len(result) == 1, f"{pattern}: {result}"
    return [int(number.replace(",", "")) for number in np.ravel(result[0]).tolist()]


def test_a_control_message_has_the_documented_size() -> None:
    fixed, row, block, wide_block, token, bias = numbers(
        r"at most (\d+), then (\d+) a row, (\d+) \(or (\d+)\) for each block in use, "
        r"(\d+) for each input token and (\d+) for each bias"
    )
    for n in (1, 2, 17, 64):
        arrays = n * (row + 2 * block + token)
        assert arrays < message_size(decodes(n)) <= arrays + fixed
        assert message_size(decodes(n), LARGE) - message_size(decodes(n)) in range(
            2 * n * (wide_block - block), 2 * n * (wide_block - block) + 3
        )
    prefill = {**ONE, "initiation": True, "kv_length": 24, "token_ids": [1] * 24, "blocks": [1] * 6}
    pieces = message_of([{**prefill, "flags": 1, "earlier_ids": [1] * 8, "token_ids": [1] * 16}] * 64)
    arrays = 64 * (row + 6 * block + (8 + 16) * token)
    assert arrays < message_size(pieces) <= arrays + fixed
    biases = [(token_id, 1.0) for token_id in range(100)]
    prefills = message_of([{**prefill, "bias": biases}] * 64)
    arrays = 64 * (row + 6 * block + 24 * token + 100 * bias)
    assert arrays < message_size(prefills) <= arrays + fixed
    # A length is written in as few bytes as it needs; arrays of megabytes come near to the most.
    names = ("sampling", "integers", "flags", "token_ids", "earlier_ids", "blocks", "bias")
    payload = Iteration(**{name: bytes(3 << 20) for name in names})
    assert fixed - 5 <= size(MESSAGE, payload, stage=0) - len(names) * (3 << 20) <= fixed
    n_blocks = numbers(r"A block's number takes 4 bytes where there are more than ([\d,]+) blocks")
    assert n_blocks == [SMALL.n_blocks]


def test_a_worker_s_reports_have_the_documented_size() -> None:
    (most,) = numbers(r"or is in trouble \| (\d+) at most, or the reason")
    time = encode_stage_time(StageTime(1.5, MOST))
    sizes = [size(READY), size(PASSED), size(RECEIVED, time), size(DONE, time)]
    assert max(sizes) == most
    assert size(TROUBLE, "x" * 1000) > most, "or the reason"


def test_tokens_have_the_documented_size() -> None:
    fixed, token = numbers(r"an iteration's tokens \| at most (\d+), then (\d+) a row")
    n_rows = 4096
    message = message_of([ONE] * n_rows)
    sampled = Sampled(np.zeros(n_rows, np.int32))
    whole = size(TOKENS, encode_sampled(sampled, expected_records(message)))
    assert whole == fixed + token * n_rows
