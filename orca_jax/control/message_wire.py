"""A control message as the payload of MESSAGE: the fields of worker.proto's Iteration, with all checks.

A row takes 64 bytes, 4 bytes for each input token, and its blocks in use: the blocks that hold its
`kv_length` tokens, not all reserved ones. A block number takes 2 bytes if the K/V manager has up to 65,536
blocks, otherwise 4. A decode row therefore fits in 1 KB up to 480 blocks in use (7,680 tokens with 16-token
blocks), or 240 with 4-byte block numbers. A prefill row adds its prompt tokens and biases.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from orca_jax.control import worker_pb2
from orca_jax.control.frame import FRAME_BYTES
from orca_jax.errors import BadFrame
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.message import (
    ADJUSTED,
    BIAS,
    CONSTRAINED,
    DRAFTED,
    POOLED,
    ROUTED,
    SAMPLED,
    SAMPLING,
    ControlMessage,
    EncoderInputs,
)
from orca_jax.iteration.shape import EngineShape
from orca_jax.request.sampled import LOGPROBS
from orca_jax.request.sampling_params import MAX_BIASES, MAX_TOP_LOGPROBS, REPETITION_RANGE

_INT = np.dtype("<i4")
_INITIATION, _ON_DEVICE = 1, 2  # bits of a row's flags
_INTEGERS = ("row", "token_index", "input_length", "kv_length", "n_prompt", "next_token")
_INTEGERS_BYTES = 4 * len(_INTEGERS)  # for one row
ROW_BYTES = SAMPLING.itemsize + _INTEGERS_BYTES + 1  # the last byte holds the flags
_COPY_BYTES = 8
_FIELDS_BYTES = 64  # upper bound of a payload's protobuf overhead around its arrays
# Allowed values of the SAMPLING fields, as in SamplingParams; a seed may have any value.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": REPETITION_RANGE,
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "top_k": (0, 1 << 30),
    "logprobs": (-1, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (-1, MAX_TOP_LOGPROBS),
    "flags": (0, ADJUSTED | CONSTRAINED | POOLED | ROUTED | DRAFTED),
}


def most_bytes(shape: EngineShape) -> int:
    """An upper bound on a frame's bytes: a control message, words, or tokens and log-probabilities."""
    message = shape.max_rows * (ROW_BYTES + MAX_BIASES * BIAS.itemsize + 3 * _COPY_BYTES)
    message += 2 * _COPY_BYTES * (shape.max_rows + shape.n_rows) * (shape.max_drafts > 0)
    message += (4 * shape.max_rows + 8 * shape.max_adapters) * (shape.max_adapters > 0)
    message += 4 * (shape.max_tokens + shape.n_blocks + shape.n_slots)
    message += 4 * (shape.max_rows + shape.max_tokens) * (shape.max_encoder_blocks > 0)
    message += 2 * _COPY_BYTES * min(shape.n_blocks, shape.n_host_blocks)
    message += 2 * _COPY_BYTES * min(shape.n_states, shape.n_host_states)
    words = 4 * shape.max_rows * n_words(shape.vocab_size)
    tokens = 4 * shape.max_rows + LOGPROBS.itemsize * (shape.max_rows + shape.max_tokens)
    tokens += 4 * shape.max_rows * shape.embedding_size
    tokens += shape.max_tokens * shape.routing.token_bytes
    return max(message, words, tokens) + _FIELDS_BYTES + FRAME_BYTES


def encode_message(message: ControlMessage, shape: EngineShape) -> worker_pb2.Iteration:
    """Encode the message with only its blocks in use, which hold `kv_length` tokens."""
    integers = b"".join([_ints(getattr(message, name)) for name in _INTEGERS])
    flags = message.initiation * np.uint8(_INITIATION) + message.token_on_device * np.uint8(_ON_DEVICE)
    blocks = message.block_table[_in_use(message.kv_length, message.block_table.shape[1], shape)]
    encoder = message.encoder
    return worker_pb2.Iteration(
        sampling=message.sampling.tobytes(),
        integers=integers,
        flags=flags.tobytes(),
        token_ids=_ints(message.token_ids),
        earlier_ids=_ints(message.earlier_ids),
        blocks=blocks.astype(_block_dtype(shape)).tobytes(),
        bias=message.bias.tobytes(),
        **({} if encoder is None else _encode_encoder(encoder, shape)),
        adapters=b"" if message.adapter is None else _ints(message.adapter),
        put_adapters=_ints(message.put_adapters),
        copies=_ints(message.copies),
        to_host=_ints(message.to_host),
        from_host=_ints(message.from_host),
        states_before=_ints(message.states_before),
        states_after=_ints(message.states_after),
        states_kept=_ints(message.states_kept),
    )


def decode_message(payload: worker_pb2.Iteration, shape: EngineShape) -> ControlMessage:
    """Decode a message; blocks not in use become 0.

    Raises BadFrame for anything that this engine's master would not send, so a worker can rely on the result.
    The arrays use memory proportional to the received bytes, plus `max_blocks` integers a row.
    """
    data = payload.integers
    n, n_tokens = len(data) // _INTEGERS_BYTES, len(payload.token_ids) // 4
    if not (1 <= n <= shape.max_rows and n <= n_tokens <= shape.max_tokens):
        message = f"a control message has {n} rows and {n_tokens} tokens; it needs at least one token a row, "
        raise BadFrame(message + f"and up to {shape.max_rows} rows and {shape.max_tokens} tokens are allowed")
    integers = _array("integers", data, _INT, n * len(_INTEGERS)).reshape(-1, n)
    sampling = _array("sampling", payload.sampling, SAMPLING, n)
    flags = _array("flags", payload.flags, np.dtype(np.uint8), n)
    token_ids = _array("token_ids", payload.token_ids, _INT, n_tokens)
    n_earlier = len(payload.earlier_ids) // 4
    earlier_ids = _array("earlier_ids", payload.earlier_ids, _INT, n_earlier)
    bias = _array("bias", payload.bias, BIAS, len(payload.bias) // BIAS.itemsize)
    put, copies, to_host, from_host, before, after, kept = (
        _array(name, data, _INT, len(data) // _COPY_BYTES * 2).reshape(-1, 2)
        for name, data in (
            ("put_adapters", payload.put_adapters),
            ("copies", payload.copies),
            ("to_host", payload.to_host),
            ("from_host", payload.from_host),
            ("states_before", payload.states_before),
            ("states_after", payload.states_after),
            ("states_kept", payload.states_kept),
        )
    )
    _check(integers, token_ids, shape)
    _check_put(put, shape)
    _check_copies(copies, shape)
    _check_host_copies("to_host", to_host, block=to_host[:, 0], place=to_host[:, 1], shape=shape)
    _check_host_copies("from_host", from_host, block=from_host[:, 1], place=from_host[:, 0], shape=shape)
    _check_state_copies(before, after, kept, integers[0], shape)
    _check_kept_states(kept, integers[0], shape)
    _check_sampling(sampling, bias, shape.vocab_size)
    row, token_index, input_length, kv_length, n_prompt, next_token = integers
    block_table = _block_table(payload.blocks, kv_length, shape.max_blocks, shape)
    initiation, on_device = (flags & _INITIATION) > 0, (flags & _ON_DEVICE) > 0
    if (flags > (_INITIATION | _ON_DEVICE)).any() or (on_device & (input_length > 1)).any():
        raise BadFrame("a row has unknown flags, or says that several input tokens are on the device")
    pools = (sampling["flags"] & POOLED) > 0
    if (pools & ~initiation).any() or (pools.any() and not shape.embedding_size):
        raise BadFrame(
            "a row pools hidden states that it does not have: it decodes, or the engine pools none"
        )
    drafted = (sampling["flags"] & DRAFTED) > 0
    if (drafted & (initiation | on_device | (input_length > 1))).any() or (
        drafted.any() and not shape.drafts
    ):
        raise BadFrame(
            "a row counts drafts without one known input token, or in an engine that drafts nothing"
        )
    if (sampling["flags"] & ROUTED).any() and not shape.sparse_layers:
        raise BadFrame("a row asks for its tokens' experts, which this engine does not report")
    if (~initiation & (n_prompt > 0)).any():
        raise BadFrame("a decode row has a prompt")
    if (on_device & (next_token != SAMPLED)).any():
        raise BadFrame("a row's input token is on the device, but its next token is known")
    if ((n_prompt > kv_length) & (next_token == SAMPLED)).any():
        raise BadFrame("a row samples a token before the end of its prompt")
    message = ControlMessage(
        row=row,
        initiation=initiation,
        token_index=token_index,
        input_length=input_length,
        kv_length=kv_length,
        n_prompt=n_prompt,
        next_token=next_token,
        token_ids=token_ids,
        earlier_ids=earlier_ids,
        token_on_device=on_device,
        block_table=block_table,
        sampling=sampling,
        bias=bias,
        encoder=_decode_encoder(payload, n, shape),
        adapter=_decode_adapters(payload.adapters, n, shape),
        put_adapters=put,
        copies=copies,
        to_host=to_host,
        from_host=from_host,
        states_before=before,
        states_after=after,
        states_kept=kept,
    )
    if message.encoder is not None:
        n_read = int(message.encoder.length[message.encodes].sum(dtype=np.int64))
        if n_read != len(message.encoder.token_ids):
            raise BadFrame("the encoder's tokens do not match the lengths of the rows that run it")
    n_needed = int((kv_length - input_length)[message.set_up].sum(dtype=np.int64))
    if n_earlier != n_needed:
        raise BadFrame(f"{n_earlier} earlier tokens came, but the rows that need them have {n_needed}")
    if n_earlier:
        _within("token id", earlier_ids, 0, shape.vocab_size - 1)
    return message


def _block_dtype(shape: EngineShape) -> np.dtype[Any]:
    return np.dtype("<u2" if shape.n_blocks <= 1 << 16 else "<i4")


def _ints(values: npt.NDArray[Any]) -> bytes:
    return values.astype(_INT, copy=False).tobytes()


def _array(name: str, data: bytes, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    needed = dtype.itemsize * count
    if len(data) != needed:
        raise BadFrame(
            f"a control message's {name} has {len(data)} bytes; its {count} elements take {needed}"
        )
    return np.frombuffer(data, dtype, count)


def _in_use(length: npt.NDArray[Any], max_blocks: int, shape: EngineShape) -> npt.NDArray[np.bool_]:
    """`[R, max_blocks]`: which entries of a block table hold one of `length` [R] tokens."""
    return np.arange(max_blocks) * shape.block_size < length[:, np.newaxis]


def _block_table(
    data: bytes, length: npt.NDArray[Any], max_blocks: int, shape: EngineShape
) -> npt.NDArray[np.int32]:
    """The table [R, max_blocks] of the blocks that hold `length` [R] tokens; the others are 0."""
    in_use = _in_use(length, max_blocks, shape)
    blocks = _array("blocks", data, _block_dtype(shape), int(np.count_nonzero(in_use)))
    _within("block", blocks, 0, shape.n_blocks - 1)
    table = np.zeros((len(length), max_blocks), np.int32)
    table[in_use] = blocks
    return table


def _encode_encoder(encoder: EncoderInputs, shape: EngineShape) -> dict[str, bytes]:
    """The fields of worker.proto's Iteration for an encoder."""
    blocks = encoder.block_table[_in_use(encoder.length, shape.max_encoder_blocks, shape)]
    return {
        "encoder_length": _ints(encoder.length),
        "encoder_ids": _ints(encoder.token_ids),
        "encoder_blocks": blocks.astype(_block_dtype(shape)).tobytes(),
    }


def _decode_adapters(data: bytes, n_rows: int, shape: EngineShape) -> npt.NDArray[np.int32] | None:
    """The adapter of each row; None if no row has one. Raises BadFrame."""
    if not data:
        return None
    adapters = _array("adapters", data, _INT, n_rows)
    _within("adapter", adapters, 0, shape.max_adapters)
    return adapters


def _decode_encoder(payload: worker_pb2.Iteration, n_rows: int, shape: EngineShape) -> EncoderInputs | None:
    """The inputs of an encoder; None for an engine without one. Raises BadFrame."""
    if not shape.max_encoder_blocks:
        if payload.encoder_length or payload.encoder_ids or payload.encoder_blocks:
            raise BadFrame("a control message is for an encoder, and the model has none")
        return None
    length = _array("encoder_length", payload.encoder_length, _INT, n_rows)
    _within("encoder length", length, 1, shape.max_encoder_blocks * shape.block_size)
    n_tokens = len(payload.encoder_ids) // 4
    if n_tokens > shape.max_tokens:
        raise BadFrame(f"{n_tokens} tokens for the encoder came; up to {shape.max_tokens} are allowed")
    token_ids = _array("encoder_ids", payload.encoder_ids, _INT, n_tokens)
    if n_tokens:
        _within("token id", token_ids, 0, shape.vocab_size - 1)
    table = _block_table(payload.encoder_blocks, length, shape.max_encoder_blocks, shape)
    return EncoderInputs(length, token_ids, table)


def _check(integers: npt.NDArray[Any], token_ids: npt.NDArray[Any], shape: EngineShape) -> None:
    longest = shape.longest
    low = np.array((0, 0, 1, 1, 0, SAMPLED))[:, np.newaxis]
    high = np.array((shape.n_rows - 1, *[longest] * 4, shape.vocab_size - 1))[:, np.newaxis]
    wrong = (integers < low) | (integers > high)
    if wrong.any():
        column, at = (int(i) for i in np.argwhere(wrong)[0])
        _within(_INTEGERS[column], integers[column, at : at + 1], int(low[column, 0]), int(high[column, 0]))
    _within("token id", token_ids, 0, shape.vocab_size - 1)
    input_length, kv_length = integers[2], integers[3]
    if (input_length > kv_length).any() or int(input_length.sum(dtype=np.int64)) != len(token_ids):
        raise BadFrame("the rows' input lengths do not match their tokens")


def _check_sampling(sampling: npt.NDArray[np.void], bias: npt.NDArray[np.void], vocab_size: int) -> None:
    for name, (low, high) in _RANGES.items():
        values = sampling[name]
        if not ((values >= low) & (values <= high)).all():  # also rejects NaN
            raise BadFrame(f"a row's {name} is out of range; it must be {low:g} to {high:g}")
    if len(bias):
        _within("a bias's place", bias["index"], 0, len(sampling) - 1)
        _within("token id", bias["token_id"], 0, vocab_size - 1)
        if not np.isfinite(bias["value"]).all():
            raise BadFrame("a bias is not finite")


def _check_put(put: npt.NDArray[np.int32], shape: EngineShape) -> None:
    if not len(put):
        return
    _within("an adapter's version", put[:, 0], 0, (1 << 31) - 1)
    _within("an adapter's slot", put[:, 1], 0, shape.max_adapters - 1)
    if np.unique(put[:, 1]).size < len(put):
        raise BadFrame("two adapters came for one slot")


def _check_copies(copies: npt.NDArray[np.int32], shape: EngineShape) -> None:
    if not len(copies):
        return
    _within("a copied block", copies, 0, shape.n_blocks - 1)
    into = copies[:, 1]
    if len(copies) > shape.max_rows or np.unique(into).size < into.size or np.isin(into, copies[:, 0]).any():
        message = (
            f"{len(copies)} copies of blocks came; at most {shape.max_rows} are allowed, each to a block "
        )
        raise BadFrame(message + "of its own that is not copied itself")


def _check_host_copies(
    name: str,
    copies: npt.NDArray[np.int32],
    *,
    block: npt.NDArray[np.int32],
    place: npt.NDArray[np.int32],
    shape: EngineShape,
) -> None:
    """Check copies between blocks and places in the host's memory, each to a block or place of its own.

    After the blocks come recurrent layers' states, and their places after those of blocks.
    """
    if not len(copies):
        return
    n_states = shape.n_states if shape.n_host_states else 0
    _within("a block of the host tier", block, 0, shape.n_blocks + n_states - 1)
    _within("a place of the host tier", place, 0, shape.n_host_blocks + shape.n_host_states - 1)
    if ((block < shape.n_blocks) != (place < shape.n_host_blocks)).any():
        raise BadFrame(f"copies {name} came between blocks and places of states")
    if np.unique(copies[:, 1]).size < len(copies):
        raise BadFrame(f"{len(copies)} copies {name} came; each must have a target of its own")


def _check_state_copies(
    before: npt.NDArray[np.int32],
    after: npt.NDArray[np.int32],
    kept: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int32],
    shape: EngineShape,
) -> None:
    """Check copies of states between rows of the iteration and snapshots, each to a state of its own.

    States after drafts are copied to any row, and to snapshots those that the iteration keeps.
    """
    first_kept = shape.n_rows + shape.n_snapshots
    if len(before):
        _within("a copied state", before[:, 0], shape.n_rows, shape.n_states - 1)
        _within("a row's state", before[:, 1], 0, shape.n_rows - 1)
    if len(after):
        _within("a snapshot", after[:, 1], shape.n_rows, first_kept - 1)
    row_of_snapshot = before[before[:, 0] < first_kept, 1]
    is_copied = np.isin(row_of_snapshot, rows).all() and np.isin(after[:, 0], [*rows, *kept[:, 1]]).all()
    if not is_copied or any(np.unique(copies[:, 1]).size < len(copies) for copies in (before, after)):
        raise BadFrame(
            f"{len(before) + len(after)} copies of states came; each must be between a row of the iteration "
            "and a snapshot or a state after a draft, and to a state of its own"
        )


def _check_kept_states(kept: npt.NDArray[np.int32], rows: npt.NDArray[np.int32], shape: EngineShape) -> None:
    """Check the states that are kept after drafted rows' tokens."""
    if not len(kept):
        return
    index, place = kept[:, 0], kept[:, 1]
    _within("a drafted row", index, 0, len(rows) - 1)
    _within("a state after a draft", place, shape.n_rows + shape.n_snapshots, shape.n_states - 1)
    is_followed = np.append(rows, -1)[index + 1] == rows[index]
    if np.unique(index).size < len(kept) or np.unique(place).size < len(kept) or not is_followed.all():
        raise BadFrame(
            f"{len(kept)} states after drafts came; each must be of a row that another one of its request "
            "follows, and have a place of its own"
        )
    longest = int(np.bincount(rows[index]).max())
    if longest > shape.max_drafts:
        raise BadFrame(f"a request has {longest} drafts; at most {shape.max_drafts} are allowed")


def _within(name: str, values: npt.NDArray[Any], low: int, high: int) -> None:
    least, most = int(values.min()), int(values.max())
    if least < low or most > high:
        wrong = least if least < low else most
        raise BadFrame(f"a control message has {name} {wrong}; it must be {low} to {high}")
