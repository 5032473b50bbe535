"""What one iteration must move and compute: one truth for benchmarks' floors, `orca plan` and simulation.

Counts what cannot be avoided on one device: each weight read once, each activation written and read once
between operations, each key and value in reach read once. Norms, activation functions and residual sums
are taken to be fused into the matrix products beside them, and cost nothing here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from orca_jax.config import ModelConfig

OperationKind = Literal["embed", "linear", "attention", "head", "sampler"]

LOGIT_BYTES = 4  # logits are float32, whatever the weights are


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of an iteration: bytes to and from memory, and floating-point operations."""

    kind: OperationKind
    n_bytes: float
    n_flops: float


@dataclass(frozen=True, slots=True)
class Device:
    """What a device can do: `bandwidth` in bytes, `matrix_rate` in floating-point operations, a second."""

    bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class IterationShape:
    """The requests of one iteration, one entry each.

    `input_lengths`: tokens that go in (all known tokens in the initiation phase, one in the increment
    phase). `kv_lengths`: tokens in the cache after they were written, the input ones included.
    """

    input_lengths: Sequence[int]
    kv_lengths: Sequence[int]

    def __post_init__(self) -> None:
        pairs = zip(self.input_lengths, self.kv_lengths, strict=True)
        assert all(1 <= q <= k for q, k in pairs), "a row's input tokens are the last of its kv_length"


def operations(
    model: ModelConfig, shape: IterationShape, *, weight_bytes: int, kv_bytes: int
) -> list[Operation]:
    """The operations of one iteration in the order they run.

    `weight_bytes` is the size of one element of weights and activations, `kv_bytes` of one element of the
    K/V cache. Per layer: qkv, attention, out, up, down; before them the embedding, after them head
    (one row a request) and sampler.
    """
    n_tokens = sum(shape.input_lengths)
    n_rows = len(shape.input_lengths)
    hidden, ffn, embedding = model.hidden_size, model.ffn_size, model.embedding_size
    vocab = model.padded_vocab_size

    def linear(n_in: int, n_out: int, *, bias: bool) -> Operation:
        n_weights = n_in * n_out + (n_out if bias else 0)
        n_activations = n_tokens * (n_in + n_out)
        return Operation("linear", weight_bytes * (n_weights + n_activations), 2 * n_tokens * n_in * n_out)

    bias = model.use_bias
    layer = [
        linear(hidden, 3 * hidden, bias=bias),
        _attention(hidden, shape, weight_bytes=weight_bytes, kv_bytes=kv_bytes),
        linear(hidden, hidden, bias=bias),
        linear(hidden, ffn, bias=bias),
        linear(ffn, hidden, bias=bias),
    ]
    projected = embedding != hidden
    # A token's row of each table is read, their sum is written.
    embed = Operation("embed", weight_bytes * n_tokens * (embedding + 2 * hidden), n_tokens * hidden)
    n_head_bytes = weight_bytes * embedding * (vocab + n_rows) + LOGIT_BYTES * n_rows * vocab
    return [
        embed,
        *([linear(embedding, hidden, bias=False)] if projected else []),
        *(layer * model.n_layers),
        *([linear(hidden, embedding, bias=False)] if projected else []),
        Operation("head", n_head_bytes, 2 * n_rows * embedding * vocab),
        Operation("sampler", LOGIT_BYTES * n_rows * vocab, n_rows * vocab),
    ]


def _attention(hidden: int, shape: IterationShape, *, weight_bytes: int, kv_bytes: int) -> Operation:
    """Split attention of one layer: queries in, keys and values written, all in reach read, results out."""
    n_tokens = sum(shape.input_lengths)
    n_kv_bytes = 2 * hidden * kv_bytes * (n_tokens + sum(shape.kv_lengths))
    # Each query sees the keys up to its own position: k - q + 1 for the first of q queries, k for the last.
    pairs = zip(shape.input_lengths, shape.kv_lengths, strict=True)
    n_seen = sum(q * (k - q) + q * (q + 1) // 2 for q, k in pairs)
    # A key and a query: 2 operations an element; a weight and a value: 2 more.
    return Operation("attention", n_kv_bytes + 2 * n_tokens * hidden * weight_bytes, 4 * hidden * n_seen)


def floor(operations: Iterable[Operation], device: Device) -> float:
    """Seconds below which these operations cannot run one after the other on `device`.

    The sum over operations of the larger of bytes over bandwidth and operations over the matrix rate.
    """
    return sum(max(op.n_bytes / device.bandwidth, op.n_flops / device.matrix_rate) for op in operations)


def parameter_count(model: ModelConfig) -> int:
    """Elements of all weights, the padded rows of the vocabulary included."""
    hidden, ffn, embedding = model.hidden_size, model.ffn_size, model.embedding_size
    norm = 2 * hidden
    biases = 3 * hidden + hidden + ffn + hidden if model.use_bias else 0
    layer = 3 * hidden * hidden + hidden * hidden + 2 * hidden * ffn + biases + 2 * norm
    tables = model.padded_vocab_size * embedding + (model.n_positions + model.position_offset) * hidden
    projections = 2 * hidden * embedding if embedding != hidden else 0
    head = 0 if model.tie_embeddings else model.padded_vocab_size * embedding
    return tables + projections + model.n_layers * layer + (norm if model.final_norm else 0) + head


def weight_bytes_total(model: ModelConfig, itemsize: int) -> int:
    """Bytes of all weights at `itemsize` bytes an element."""
    return parameter_count(model) * itemsize


def kv_bytes_per_slot(model: ModelConfig, itemsize: int) -> int:
    """Bytes of one slot: one token's key and value in every layer (ORCA 4.2)."""
    return 2 * model.n_layers * model.hidden_size * itemsize
