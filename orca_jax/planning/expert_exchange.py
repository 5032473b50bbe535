"""Whether a layer's experts get tokens by an exchange, or all devices have all tokens (docs/experts.md).

The engine asks it when it compiles a bucket, and `orca plan` when it counts bytes: nothing else decides.
"""

from dataclasses import dataclass

from orca_jax.config import ExpertExchange
from orca_jax.families.model_config import Layer
from orca_jax.families.parameters import whole_experts
from orca_jax.planning.device_traffic import exchanged_bytes, gathered_bytes
from orca_jax.planning.known_devices import CPU, KnownDevice

# What XLA's ragged all-to-all was seen to do; none of it was measured here.
# Bytes/s that a device sends inside a machine: 16.42 GiB/s on eight B200 with NVLink. Across two such
# machines it filled the network links (github.com/openxla/xla/issues/33386).
_RAGGED_INSIDE = 16.42 * (1 << 30)
# Seconds for each other device, however little it gets: on A100s, jax 0.10.0 (openxla/xla/issues/46982).
_RAGGED_SECONDS = 12e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeRule:
    """The rule for the `n_devices` of one stage. `device` is None if their links are not known.

    A call says whether a layer exchanges its `n_tokens` tokens, padding included, whose hidden states have
    `width` bytes each.
    """

    device: KnownDevice | None
    n_devices: int
    asked: ExpertExchange = "auto"

    def __call__(self, layer: Layer, width: int, n_tokens: int) -> bool:
        if self.asked == "gather" or not exchangeable(layer, self.n_devices):
            return False
        return self.asked == "exchange" or self._is_faster(layer, width, n_tokens)

    def _is_faster(self, layer: Layer, width: int, n_tokens: int) -> bool:
        # A CPU's exchange is padded, and moves more than all-reduces do.
        if self.device is None or self.device.name == CPU:
            return False
        gathered, exchanged = exchange_seconds(self.device, layer, width, n_tokens, self.n_devices)
        return exchanged < gathered


def exchangeable(layer: Layer, n_devices: int) -> bool:
    """Whether a layer can exchange tokens: each device has whole experts, and nothing else needs all tokens.

    A shared expert is split over the devices as a dense layer is, so each of them needs all tokens anyway.
    """
    own = layer.feed_forward
    if own is None or own.experts is None or layer.cross is not None or layer.beside is not None:
        return False
    if own.experts.shared_size is not None or own.experts.latent_size is not None:
        return False
    return n_devices > 1 and whole_experts(
        own.size, own.experts.number, n_devices, packed=layer.has_whole_experts
    )


def exchange_seconds(
    device: KnownDevice, layer: Layer, width: int, n_tokens: int, n_devices: int
) -> tuple[float, float]:
    """Seconds of a layer's collectives: with two all-reduces, and with an exchange.

    Rings take no account of latency: the exchange's three have fewer steps than two all-reduces.
    """
    assert layer.experts is not None
    ring = device.ring_rate(n_devices)
    # Unlike rings, point-to-point sends do not spread over all of a machine's network links: each device has
    # its own (github.com/NVIDIA/nccl-tests/issues/267).
    inside = n_devices <= device.per_machine
    ragged = min(device.inside, _RAGGED_INSIDE) if inside else device.between
    rings, moved = exchanged_bytes(layer.experts, width, n_tokens, n_devices)
    started = 2 * (n_devices - 1) * _RAGGED_SECONDS
    return gathered_bytes(width, n_tokens, n_devices) / ring, rings / ring + moved / ragged + started
