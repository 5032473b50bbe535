"""The bytes that a stage's devices send to each other and to the next stage's in an iteration (ORCA 4.1)."""

import math
from typing import Protocol

from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.planning.cost_model import IterationShape, IterationSums, sums_of

# Bytes of a token's routing in an exchange, for each chosen expert: its number and weight.
_ROUTING_BYTES = 4 + 4


class Exchanges(Protocol):
    """Whether a layer exchanges tokens; `last`: it computes only each request's last token."""

    def __call__(self, layer: Layer, *, last: bool) -> bool: ...


def shared_bytes(
    model: ModelConfig,
    shape: IterationShape | IterationSums,
    *,
    weight_bytes: int,
    layers: range | None = None,
    n_shards: int = 1,
    exchanges: Exchanges | None = None,
) -> float:
    """Bytes that each device of a stage sends to the stage's other devices in one iteration.

    A layer has two all-reduces (after `out` and `down`), with cross attention three; the embedding has one.
    Each uses a ring, in which a device sends 2 (n - 1) / n of the array. After the head, an all-gather joins
    the logits. The model's last layer and the head have one token a request. A layer that `exchanges` tokens
    sends `exchanged_bytes` in place of its all-reduces.
    """
    layers = range(model.n_layers) if layers is None else layers
    last = layers.stop == model.n_layers
    each = 2 if model.encoder is None else 3
    n_sums = each * (len(layers) - last) + (layers.start == 0)
    n_sums += sum(model.layers[i].beside is not None for i in layers)
    sums = sums_of(shape)
    n_summed = n_sums * hop_bytes(model, shape, weight_bytes=weight_bytes)
    n_summed += each * last * weight_bytes * sums.n_rows * model.hidden_size
    n_gathered = weight_bytes * sums.n_rows * model.padded_vocab_size * last
    total = (n_shards - 1) / n_shards * (2 * n_summed + n_gathered)
    for i in layers if exchanges is not None else ():
        layer, is_last = model.layers[i], i == model.n_layers - 1
        if exchanges is not None and exchanges(layer, last=is_last):
            assert layer.experts is not None
            width = weight_bytes * model.hidden_size
            n_tokens = sums.n_rows if is_last else sums.n_tokens
            whole, moved = exchanged_bytes(layer.experts, width, n_tokens, n_shards)
            total += whole + moved - gathered_bytes(width, n_tokens, n_shards)
    return total


def hop_bytes(model: ModelConfig, shape: IterationShape | IterationSums, *, weight_bytes: int) -> int:
    """Bytes of the hidden states [T, H]: what each device of a stage sends to the next stage."""
    return weight_bytes * sums_of(shape).n_tokens * model.hidden_size


def gathered_bytes(width: int, n_tokens: float, n_devices: int) -> float:
    """Bytes that a device sends for a layer whose two sums are all-reduces; a token has `width` bytes."""
    return 4 * (n_devices - 1) / n_devices * n_tokens * width


def exchanged_bytes(experts: Experts, width: int, n_tokens: float, n_devices: int) -> tuple[float, float]:
    """Bytes that a device sends for a layer that exchanges tokens: by rings, and by the exchange.

    Rings: a reduce-scatter after attention, and all-gathers after the experts and of the routing. Exchange: a
    token goes once to each device that holds experts it chose (at random), and back.
    """
    rings = 2 * width + _ROUTING_BYTES * experts.top_k
    exchanged = 2 * chooses_device(experts, n_devices) * width
    sent = (n_devices - 1) / n_devices * n_tokens
    return sent * rings, sent * exchanged


def chooses_device(experts: Experts, n_devices: int) -> float:
    """The probability that a token, which chooses at random, has an expert of one of `n_devices`."""
    others = experts.number - experts.number // n_devices
    return 1 - math.comb(others, experts.top_k) / math.comb(experts.number, experts.top_k)
