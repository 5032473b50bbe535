"""The reference: the same model for one request, dense, without cache, padding or batching.

It shares no code with the engine except the parameters' names and the rotary frequencies, and is written to
be compared with the papers line by line. Everything is float32. A recurrence runs a token at a time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.families.attention_config import Attention, Indexer, KVCode, Latent, RelativeBias
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import GatedDeltaNet, Mamba2, Recurrence, ShortConvolution
from orca_jax.families.rotary import Rotary

Parameters = Mapping[str, jax.Array]


def forward(
    config: ModelConfig,
    parameters: Parameters,
    token_ids: jax.Array,
    encoder_ids: jax.Array | None = None,
    *,
    routed: list[jax.Array] | None = None,
    states: jax.Array | None = None,
    outputs: jax.Array | None = None,
    passed: list[jax.Array] | None = None,
    index_scores: list[jax.Array] | None = None,
) -> jax.Array:
    """Logits [T, V] float32 of every position of one sequence `token_ids` [T] int32.

    A model with an encoder needs the encoder's input `encoder_ids` [S] int32, which may end with padding ids
    below 0; `token_ids` are then the decoder's. The experts of each sparse layer, [T, k], are appended to
    `routed`. A head needs the `states` [T, s] before its tokens; an EAGLE-3 head has only those before its
    first tokens, and before the last ones its own `outputs` [n, H]. Each layer's input, the last one's output
    and that after the final norm, [T, H] each, are appended to `passed`, and the scores [T, T] by which an
    indexer selects keys, layer by layer, to `index_scores`.
    """
    p = {name: value.astype(jnp.float32) for name, value in parameters.items()}
    selections: list[jax.Array] = []  # which keys each query sees, of the layers with an indexer of their own
    seen_by_later: dict[int, tuple[jax.Array, jax.Array]] = {}  # each layer's keys and values

    def norm(kind: Norm, name: str, value: jax.Array) -> jax.Array:
        scale = p[f"{name}.scale"] + (1 if kind.unit_offset else 0)
        if kind.kind == "rms_norm":
            return value / jnp.sqrt((value**2).mean(axis=-1, keepdims=True) + kind.eps) * scale
        mean = value.mean(axis=-1, keepdims=True)
        variance = ((value - mean) ** 2).mean(axis=-1, keepdims=True)
        return (value - mean) / jnp.sqrt(variance + kind.eps) * scale + p.get(f"{name}.bias", 0)

    def linear(name: str, value: jax.Array) -> jax.Array:
        product = jnp.einsum("ti,...i->t...", value, p[f"{name}.weight"])
        return product + p[f"{name}.bias"] if f"{name}.bias" in p else product

    def heads(layer: Attention, name: str, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, [T, N, D] each, with K/V heads repeated for their query heads."""
        if layer.latent is not None:
            return latent_heads(layer, layer.latent, name, value)
        n_tokens, n_groups, n_kv, size = len(value), layer.group, layer.n_kv_heads, layer.head_size
        slices = linear(f"{name}.qkv", value)  # [T, G + 2, K D]
        if layer.output_gate:
            slices = slices[:, n_groups:]
        q = slices[:, :n_groups]
        k = slices[:, n_groups] if layer.kv_from is None else jnp.zeros((n_tokens, n_kv * size))
        v = k if layer.values_are_keys or layer.kv_from is not None else slices[:, n_groups + 1]
        if layer.qk_norm is not None and layer.qk_norm.over == "width":
            scale = p[f"{name}.q_norm.scale"] + (1 if layer.qk_norm.norm.unit_offset else 0)
            squares = (q**2).mean(axis=(1, 2), keepdims=True)
            q = q / jnp.sqrt(squares + layer.qk_norm.norm.eps) * scale.reshape(n_groups, -1)
            k = k if layer.kv_from is not None else norm(layer.qk_norm.norm, f"{name}.k_norm", k)
        # Slice g, position k is query head k G + g.
        q = q.reshape(n_tokens, n_groups, n_kv, size).swapaxes(1, 2).reshape(n_tokens, layer.n_heads, size)
        k, v = k.reshape(n_tokens, n_kv, size), v.reshape(n_tokens, n_kv, size)
        position = jnp.arange(n_tokens)
        if layer.rotary is not None and layer.qk_norm is not None and layer.qk_norm.after_rotation:
            q, k = (_rotated(layer.rotary, each, position, config.n_positions) for each in (q, k))
        if layer.qk_norm is not None and layer.qk_norm.over == "head":
            if not layer.qk_norm.scaled:
                q, k = (
                    each / jnp.sqrt((each**2).mean(axis=-1, keepdims=True) + layer.qk_norm.norm.eps)
                    for each in (q, k)
                )
            else:
                q = norm(layer.qk_norm.norm, f"{name}.q_norm", q)
                k = k if layer.kv_from is not None else norm(layer.qk_norm.norm, f"{name}.k_norm", k)
        if layer.rotary is not None and (layer.qk_norm is None or not layer.qk_norm.after_rotation):
            q, k = (_rotated(layer.rotary, each, position, config.n_positions) for each in (q, k))
        if layer.value_norm is not None:
            v = v / jnp.sqrt((v**2).mean(axis=-1, keepdims=True) + layer.value_norm)
        if layer.kv_from is not None:
            k, v = seen_by_later[layer.kv_from]
        seen_by_later[int(name.rpartition(".")[2])] = k, v
        return scaled(layer, q, position), k.repeat(n_groups, axis=1), v.repeat(n_groups, axis=1)

    def latent_heads(
        layer: Attention, latent: Latent, name: str, value: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """DeepSeek-V2, equations 9 to 16, with all keys and values expanded."""
        n_tokens, n, position = len(value), layer.n_heads, jnp.arange(len(value))

        def turned(part: jax.Array) -> jax.Array:
            assert layer.rotary is not None
            return _rotated(layer.rotary, part, position, config.n_positions)

        if latent.query_rank is None:
            q = linear(f"{name}.q", value)
        else:
            q = linear(f"{name}.q_b", norm(latent.norm, f"{name}.q_a_norm", linear(f"{name}.q_a", value)))
        q = q.reshape(n_tokens, n, -1)
        compressed = linear(f"{name}.kv_a", value)
        c = norm(latent.norm, f"{name}.kv_a_norm", compressed[:, : latent.rank])
        of_all = turned(compressed[:, None, latent.rank :]).repeat(n, axis=1)
        kv = linear(f"{name}.kv_b", c).reshape(n_tokens, n, -1)
        keys, values = kv[..., : latent.plain_size], kv[..., latent.plain_size :]
        q = jnp.concatenate([q[..., : latent.plain_size], turned(q[..., latent.plain_size :])], axis=-1)
        return scaled(layer, q, position), jnp.concatenate([keys, of_all], axis=-1), values

    def scaled(layer: Attention, q: jax.Array, position: jax.Array) -> jax.Array:
        """Queries times their temperatures."""
        if layer.scores.temperature is None:
            return q
        offset = layer.scores.temperature.offset
        passed = jnp.floor((position + offset) / layer.scores.temperature.step)
        return q * (1 + layer.scores.temperature.scale * jnp.log(1 + passed))[:, None, None]

    def attention(layer: Attention, name: str, value: jax.Array, real: jax.Array) -> jax.Array:
        """Attention of tokens to one another; `real` [T] is false for padding, which no token sees."""
        q, k, v = heads(layer, name, value)
        k, v = (_as_cached(layer.kv_code, each) for each in (k, v))
        n_tokens, position = len(value), jnp.arange(len(value))
        scores = jnp.einsum("qnd,knd->nqk", q, k) * layer.scale
        if layer.scores.soft_cap is not None:
            scores = layer.scores.soft_cap * jnp.tanh(scores / layer.scores.soft_cap)
        distance = position[:, None] - position  # [T, T] from a query to a key before it
        if layer.scores.alibi is not None:
            slope = jnp.array(_alibi_slopes(layer.n_heads)) * layer.scores.alibi
            scores = scores - slope[:, None, None] * distance
        if layer.scores.relative is not None:
            bucket = relative_buckets(layer.scores.relative, n_tokens, causal=layer.causal)
            scores = scores + jnp.moveaxis(p[f"{name}.relative_bias"][bucket], -1, 0)
        seen = jnp.broadcast_to(real, scores.shape[1:])
        if layer.causal:
            seen &= distance >= 0
        if layer.scores.window is not None and layer.scores.chunked:
            chunk = position // layer.scores.window
            seen &= chunk[:, None] == chunk
        elif layer.scores.window is not None:
            seen &= abs(distance) < layer.scores.window
        if layer.indexer is not None and layer.latent is not None:
            if not layer.indexer.shared:
                selections.append(selected(layer.indexer, layer, layer.latent, name, value))
            seen &= selections[-1]
        scores = jnp.where(seen, scores, -jnp.inf)
        if layer.scores.sinks:  # one more key per head, which has no value
            sinks = p[f"{name}.sinks"].reshape(layer.group, -1).T.reshape(-1)  # by query head
            scores = jnp.concatenate(
                [scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], 2
            )
        weights = jax.nn.softmax(scores, axis=-1)[:, :, :n_tokens]
        merged = jnp.einsum("nqk,knd->qnd", weights, v)  # [T, N, D]
        if layer.latent is not None:
            return linear(f"{name}.out", merged.reshape(n_tokens, -1))
        by_group = merged.reshape(n_tokens, layer.n_kv_heads, layer.group, layer.head_size).swapaxes(1, 2)
        if layer.output_gate:
            by_group = by_group / (1 + jnp.exp(-linear(f"{name}.qkv", value)[:, : layer.group])).reshape(
                by_group.shape
            )
        out = p[f"{name}.out.weight"].reshape(config.hidden_size, -1)
        return by_group.reshape(n_tokens, -1) @ out.T + p.get(f"{name}.out.bias", 0)

    def selected(
        indexer: Indexer, layer: Attention, latent: Latent, name: str, value: jax.Array
    ) -> jax.Array:
        """DeepSeek-V3.2, equations 1 and 2: which keys each query sees, [T, T]."""
        assert layer.rotary is not None
        n_tokens, position = len(value), jnp.arange(len(value))
        rotary = replace(layer.rotary, interleaved=indexer.interleaved)
        compressed = norm(latent.norm, f"{name}.q_a_norm", linear(f"{name}.q_a", value))
        q = linear(f"{name}.index_q", compressed).reshape(n_tokens, indexer.n_heads, -1)
        k = norm(indexer.norm, f"{name}.index_k_norm", linear(f"{name}.index_k", value))[:, None]
        q, k = (_rotated(rotary, each, position, config.n_positions) for each in (q, k))
        each = jnp.maximum(jnp.einsum("qhd,kd->qkh", q, k[:, 0]) / math.sqrt(indexer.head_size), 0)
        w = linear(f"{name}.index_weights", value) / math.sqrt(indexer.n_heads)
        scores = jnp.where(position <= position[:, None], jnp.einsum("qh,qkh->qk", w, each), -jnp.inf)
        if index_scores is not None:
            index_scores.append(scores)
        better = scores[:, None] > scores[:, :, None]  # [T, T, T]: the last key is better than the one before
        better |= (scores[:, None] == scores[:, :, None]) & (position < position[:, None])
        return better.sum(axis=2) < indexer.top_k

    def mixed(layer: Layer, name: str, value: jax.Array, real: jax.Array) -> jax.Array:
        """Mix the tokens of a sequence, by attention or by the layer's recurrence."""
        if layer.attention is not None and layer.recurrence is not None:
            attended = layer.attention_multiplier * attention(layer.attention, name, value, real)
            return attended + layer.recurrence_multiplier * recurrence(layer.recurrence, name, value)
        if layer.attention is not None:
            return attention(layer.attention, name, value, real)
        assert layer.recurrence is not None
        return recurrence(layer.recurrence, name, value)

    def recurrence(layer: Recurrence, name: str, value: jax.Array) -> jax.Array:
        """Run a recurrence a token at a time."""
        assert layer.n_shares == 1, "the rows of weights must be in a checkpoint's order"
        match layer:
            case ShortConvolution():
                return short_convolution(layer, name, value)
            case GatedDeltaNet():
                return gated_delta_net(layer, name, value)
            case Mamba2():
                return mamba2(layer, name, value)

    def short_convolution(layer: ShortConvolution, name: str, value: jax.Array) -> jax.Array:
        """LFM2's mixer: c * convolution(b * x)."""

        def step(before: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            b, c, x = token
            window = jnp.concatenate([before, (b * x)[None]])  # [W, C], the newest last
            summed = (window * p[f"{name}.conv.weight"].T).sum(axis=0) + p.get(f"{name}.conv.bias", 0)
            return window[1:], c * summed

        empty = jnp.zeros((layer.width - 1, layer.channels))
        _, out = jax.lax.scan(step, empty, linear(f"{name}.conv_in", value))
        return linear(f"{name}.conv_out", out)

    def convolved(name: str, value: jax.Array) -> jax.Array:
        """silu of each channel's convolution over the last tokens: [T, C]."""
        weight = p[f"{name}.conv.weight"]
        padded = jnp.concatenate([jnp.zeros((weight.shape[1] - 1, value.shape[1])), value])
        taps = [weight[:, i] * padded[i : i + len(value)] for i in range(weight.shape[1])]
        return _ACTIVATIONS["silu"](sum(taps, p.get(f"{name}.conv.bias", jnp.zeros(value.shape[1]))))

    def gated_delta_net(layer: GatedDeltaNet, name: str, value: jax.Array) -> jax.Array:
        """Gated DeltaNet (Yang et al., 2024, equation 10)."""
        n, n_keys, group = len(value), layer.n_key_heads, layer.n_value_heads // layer.n_key_heads
        into = linear(f"{name}.delta_in", value)
        if layer.by_key_head:
            by_key = into.reshape(n, n_keys, -1)
            q, k = by_key[..., : layer.key_size], by_key[..., layer.key_size : 2 * layer.key_size]
            values = by_key[..., 2 * layer.key_size :].reshape(n, n_keys, 2, -1)
            into = jnp.concatenate([each.reshape(n, -1) for each in (q, k, values[:, :, 0])], axis=1)
            z = values[:, :, 1]
            gates = linear(f"{name}.delta_gates", value).reshape(n, n_keys, 2, group)
            b, a = (gates[:, :, i].reshape(n, -1) for i in range(2))
        else:
            z, b, a = (linear(f"{name}.delta_{which}", value) for which in "zba")
        mixed = convolved(name, into)
        q, k = (mixed[:, i * layer.keys : (i + 1) * layer.keys].reshape(n, n_keys, -1) for i in range(2))
        v = mixed[:, 2 * layer.keys :].reshape(n, layer.n_value_heads, -1)
        q, k = (each / jnp.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
        q, k = (each.repeat(group, axis=1) for each in (q / jnp.sqrt(layer.key_size), k))
        beta = 1 / (1 + jnp.exp(-b))
        alpha = jnp.exp(
            -jnp.exp(p[f"{name}.delta.decay"]) * jnp.logaddexp(0, a + p[f"{name}.delta.step_bias"])
        )

        def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v, alpha, beta = token
            state = alpha[:, None, None] * state  # [N, K, V]
            error = v - jnp.einsum("nk,nkv->nv", k, state)
            state = state + jnp.einsum("nk,nv->nkv", k, beta[:, None] * error)
            return state, jnp.einsum("nk,nkv->nv", q, state)

        empty = jnp.zeros((layer.n_value_heads, layer.key_size, layer.value_size))
        _, out = jax.lax.scan(step, empty, (q, k, v, alpha, beta))
        out = norm(layer.norm, f"{name}.delta_norm", out).reshape(n, -1)
        return linear(f"{name}.delta_out", out * _ACTIVATIONS["silu"](z.reshape(n, -1)))

    def mamba2(layer: Mamba2, name: str, value: jax.Array) -> jax.Array:
        """Mamba-2 (Dao & Gu, 2024, equation 1 with a scalar A for each head)."""
        n, group = len(value), layer.n_heads // layer.n_groups
        into = linear(f"{name}.space_in", value)
        if layer.multipliers:
            size = layer.n_groups * layer.state_size
            sizes = jnp.array([layer.inner, layer.inner, size, size, layer.n_heads])
            into = into * jnp.repeat(jnp.array(layer.multipliers), sizes, total_repeat_length=into.shape[1])
        z, dt = into[:, : layer.inner], into[:, -layer.n_heads :]
        mixed = convolved(name, into[:, layer.inner : -layer.n_heads])
        x = mixed[:, : layer.inner].reshape(n, layer.n_heads, -1)
        b, c = mixed[:, layer.inner :].reshape(n, 2, layer.n_groups, -1).repeat(group, axis=2).swapaxes(0, 1)
        dt = jnp.logaddexp(0, dt + p[f"{name}.space.step_bias"])
        dt = jnp.minimum(jnp.maximum(dt, layer.least_step), layer.most_step or jnp.inf)
        alpha = jnp.exp(-dt * jnp.exp(p[f"{name}.space.decay"]))

        def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            x, b, c, dt, alpha = token
            state = alpha[:, None, None] * state + jnp.einsum("n,nk,nv->nkv", dt, b, x)
            return state, jnp.einsum("nk,nkv->nv", c, state) + p[f"{name}.space.skip"][:, None] * x

        empty = jnp.zeros((layer.n_heads, layer.state_size, layer.head_size))
        _, out = jax.lax.scan(step, empty, (x, b, c, dt, alpha))
        out, gate = out.reshape(n, -1), _ACTIVATIONS["silu"](z)
        if layer.norm is None:
            return linear(f"{name}.space_out", out * gate)
        gated = (out if layer.norm_first else out * gate).reshape(n, layer.n_groups, -1)
        gated = gated / jnp.sqrt((gated**2).mean(axis=-1, keepdims=True) + layer.norm.eps)
        gated = gated.reshape(n, -1) * p[f"{name}.space_norm.scale"]
        return linear(f"{name}.space_out", gated * gate if layer.norm_first else gated)

    def cross_attention(layer: Attention, name: str, value: jax.Array, encoded: jax.Array) -> jax.Array:
        """Attention of the decoder's tokens to the encoder's output."""
        q = linear(f"{name}.cross_q", value).reshape(len(value), layer.n_heads, layer.head_size)
        keys_values = linear(f"{name}.cross_kv", encoded)  # [S, 2, K D]
        k, v = keys_values.reshape(len(encoded), 2, layer.n_heads, layer.head_size).swapaxes(0, 1)
        k, v = (_as_cached(layer.kv_code, each) for each in (k, v))
        scores = jnp.einsum("qnd,knd->nqk", q, k) * layer.scale
        weights = jax.nn.softmax(jnp.where(is_input, scores, -jnp.inf), axis=-1)
        merged = jnp.einsum("nqk,knd->qnd", weights, v)
        return linear(f"{name}.cross_out", merged.reshape(len(value), -1))

    def feed_forward(
        layer: FeedForward | None, name: str, value: jax.Array, before: jax.Array | None = None
    ) -> jax.Array:
        """Run a feed-forward; `before` is its input before the norm, if that is another array."""
        assert layer is not None
        if layer.experts is not None:
            return mixture(layer, layer.experts, name, value, value if before is None else before)
        inner = linear(f"{name}.up", value)
        if layer.activation == "xielu":
            return linear(f"{name}.down", _xielu(inner, *p[f"{name}.xielu"]))
        return layer.multiplier * linear(f"{name}.down", _activated(layer, inner))

    def mixture(
        layer: FeedForward, experts: Experts, name: str, value: jax.Array, before: jax.Array
    ) -> jax.Array:
        """Run each token through its experts, one after the other; `before` is before the layer's norm."""
        asked = value
        if experts.router_norm is not None:
            kind = Norm(kind="rms_norm", eps=experts.router_norm)
            asked = norm(kind, f"{name}.router_norm", before) * experts.router_multiplier
        weights, chosen = _routed(
            experts, linear(f"{name}.router", asked), p.get(f"{name}.router.correction")
        )
        if experts.scaled:
            weights = weights * p[f"{name}.router.scales"][chosen]
        if routed is not None:
            routed.append(chosen)
        narrow = value if experts.latent_size is None else linear(f"{name}.latent.down", value)
        out = jnp.zeros_like(narrow)
        for weight, expert in zip(weights.T, chosen.T, strict=True):  # [T] each
            up, down = p[f"{name}.experts.up.weight"][expert], p[f"{name}.experts.down.weight"][expert]
            taken = narrow * weight[:, None] if experts.weighs_inputs else narrow
            inner = jnp.einsum("t...h,th->t...", up, taken)  # [T, F], gated [T, 2, F]
            if layer.bias:
                inner = inner + p[f"{name}.experts.up.bias"][expert]
            result = jnp.einsum("thf,tf->th", down, _activated(layer, inner))
            if layer.bias:
                result = result + p[f"{name}.experts.down.bias"][expert]
            out = out + (result if experts.weighs_inputs else weight[:, None] * result)
        if experts.latent_size is not None:
            out = linear(f"{name}.latent.up", out)
        if experts.shared_size is not None:
            shared = linear(f"{name}.shared.down", _activated(layer, linear(f"{name}.shared.up", value)))
            if experts.shared_gate:
                shared = shared / (1 + jnp.exp(-value @ p[f"{name}.shared.gate"]))[:, None]
            out = out + shared
        return out

    def embedded(ids: jax.Array, side: str) -> jax.Array:
        """Embed tokens with their positions: [T, H]; `side` is "encoder." or empty."""
        stack = config.encoder if side and config.encoder is not None else config
        x = p["token_embedding"][ids] * config.embedding.multiplier  # [T, E]
        if "project_in" in p:
            x = x @ p["project_in"].T
        if stack.positions is not None:
            x = x + p[f"{side}position_embedding"][jnp.arange(len(ids)) + stack.positions.offset]
        if "segment_embedding" in p:
            segment = np.cumsum([0, *(np.asarray(ids) == config.embedding.separator)])[: len(ids)]
            x = x + p["segment_embedding"][np.minimum(segment, config.embedding.n_segments - 1)]
        kind = stack.embedding.norm if isinstance(stack, ModelConfig) else stack.embedding_norm
        return x if kind is None else norm(kind, f"{side}embedding_norm", x)

    def through(layer: Layer, name: str, x: jax.Array, real: jax.Array) -> jax.Array:
        """Run one layer."""
        m, f = layer.residual_multiplier, layer.feed_forward

        def n(which: str, value: jax.Array) -> jax.Array:
            return norm(layer.norm, f"{name}.{which}", value)

        match layer.residual:
            case "pre":
                if layer.mixes:
                    x = x + m * mixed(layer, name, n("attn_norm", x), real)
                if layer.cross is not None:
                    x = x + m * cross_attention(layer.cross, name, n("cross_norm", x), encoded)
                if f is not None:
                    x = x + m * feed_forward(f, name, n("mlp_norm", x))
            case "bare":
                x = x + m * mixed(layer, name, x, real)
                x = x + m * feed_forward(f, name, n("mlp_norm", x))
            case "joined":
                x = x + m * mixed(layer, name, joined, real)
                x = x + m * feed_forward(f, name, n("mlp_norm", x))
            case "post":
                x = n("attn_norm", x + m * mixed(layer, name, x, real))
                if layer.cross is not None:
                    x = n("cross_norm", x + m * cross_attention(layer.cross, name, x, encoded))
                x = n("mlp_norm", x + m * feed_forward(f, name, x))
            case "both":
                x = x + m * n("attn_out_norm", mixed(layer, name, n("attn_norm", x), real))
                fed = feed_forward(f, name, n("mlp_norm", x), x)
                if layer.beside is not None:
                    beside = feed_forward(layer.beside, name, n("experts_norm", x), x)
                    fed = n("mlp_mid_norm", fed) + n("experts_out_norm", beside)
                x = x + m * n("mlp_out_norm", fed)
            case "after":
                x = x + m * n("attn_out_norm", mixed(layer, name, x, real))
                x = x + m * n("mlp_out_norm", feed_forward(f, name, x))
            case "parallel":
                y = n("attn_norm", x)
                x = x + m * (mixed(layer, name, y, real) + feed_forward(f, name, y))
            case "parallel_two_norms":
                attended = mixed(layer, name, n("attn_norm", x), real)
                x = x + m * (attended + feed_forward(f, name, n("mlp_norm", x)))
        if layer.input_size is not None and f is not None:
            gate = _ACTIVATIONS[f.activation](linear(f"{name}.input_gate", x))
            own = inputs[:, int(name.rpartition(".")[2])]
            x = x + n("input_norm", linear(f"{name}.input_out", gate * own))
        return x * p[f"{name}.scalar"] if layer.scalar else x

    encoded, is_input = jnp.zeros((0, config.hidden_size)), jnp.zeros(0, bool)
    if config.encoder is not None:
        assert encoder_ids is not None
        is_input = encoder_ids >= 0
        encoded = embedded(encoder_ids, "encoder.")
        for i, layer in enumerate(config.encoder.layers):
            encoded = through(layer, f"encoder.layers.{i}", encoded, is_input)
        if config.encoder.final_norm is not None:
            encoded = norm(config.encoder.final_norm, "encoder.final_norm", encoded)

    x = embedded(token_ids, "")
    inputs = jnp.zeros((len(token_ids), config.n_layers, 0))
    if config.input_size is not None:  # [T, L, P]
        inputs = p["inputs.embedding"][token_ids].reshape(len(token_ids), config.n_layers, -1)
        projected = (x @ p["inputs.project"].T).reshape(inputs.shape) / math.sqrt(config.hidden_size)
        projected = norm(config.layers[0].norm, "inputs.norm", projected)
        inputs = (inputs * math.sqrt(config.input_size) + projected) / math.sqrt(2)
    joined = x
    if config.reads is not None:
        assert states is not None
        kind, own = config.layers[0].norm, norm(config.layers[0].norm, "states.embedding_norm", x)
        if config.reads.kind == "next_token":  # DeepSeek-V3, equation 21
            x = jnp.concatenate([own, norm(kind, "states.norm", states)], axis=1) @ p["states.project"].T
        else:  # EAGLE-3, section 3.1: only the served model's states are fused
            fused = norm(kind, "states.input_norm", states) if config.reads.norm_states else states
            before = [fused @ p["states.project"].T, *([] if outputs is None else [outputs])]
            x = jnp.concatenate(before)
            normed = norm(kind, "states.norm", x)
            x, joined = normed if config.reads.norm_first else x, jnp.concatenate([own, normed], axis=1)
    between = [x]
    for i, layer in enumerate(config.layers):
        x = through(layer, f"layers.{i}", x, jnp.ones(len(token_ids), bool))
        between.append(x)
    if config.final_norm is not None:
        x = norm(config.final_norm, "final_norm", x)
    if passed is not None:
        passed += [*between, x]
    if "project_out" in p:
        x = x @ p["project_out"].T
    head = p["token_embedding"] if config.embedding.tied else p["head.weight"]
    logits = (x @ head.T + p.get("head.bias", 0))[:, : config.vocab_size] * config.logit_multiplier
    cap = config.logit_soft_cap
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    if "head.offsets" not in p:
        return logits
    places = (jnp.arange(len(head)) + p["head.offsets"].astype(int))[:, None] == jnp.arange(config.vocab_size)
    return jnp.where(places.any(axis=0), logits @ places, -jnp.inf)


_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": lambda u: 0.5 * u * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (u + 0.044715 * u**3))),
    "gelu": lambda u: 0.5 * u * (1 + jax.scipy.special.erf(u / jnp.sqrt(2.0))),
    "relu": lambda u: jnp.maximum(u, 0),
    "silu": lambda u: u / (1 + jnp.exp(-u)),
    "relu2": lambda u: jnp.maximum(u, 0) ** 2,
}


def _xielu(
    u: jax.Array, positive: jax.Array, negative: jax.Array, beta: jax.Array, eps: jax.Array
) -> jax.Array:
    """Huang and Schlag, 2025: the integral of a linear function for u > 0, and of an exponential one."""
    alpha_p, alpha_n = jnp.log(1 + jnp.exp(positive)), beta + jnp.log(1 + jnp.exp(negative))
    below = alpha_n * (jnp.expm1(jnp.minimum(u, eps)) - u) + beta * u
    return jnp.where(u > 0, alpha_p * u**2 + beta * u, below)


def _activated(layer: FeedForward, inner: jax.Array) -> jax.Array:
    """Apply the activation between the two products: inner [T, F], gated [T, 2, F]."""
    if not layer.gated:
        return _ACTIVATIONS[layer.activation](inner)
    gate, up = layer.gate_multiplier * inner[:, 0], inner[:, 1]
    if layer.gate_limit is None:
        return _ACTIVATIONS[layer.activation](gate) * up
    gate, up = jnp.minimum(gate, layer.gate_limit), jnp.clip(up, -layer.gate_limit, layer.gate_limit)
    return gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)


def _routed(experts: Experts, logits: jax.Array, correction: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Each token's weights and experts, [T, k], from the router's logits [T, X]."""
    scores = {
        "softmax": lambda: jnp.exp(logits) / jnp.exp(logits).sum(axis=1, keepdims=True),
        "sigmoid": lambda: 1 / (1 + jnp.exp(-logits)),
        "softmax_of_chosen": lambda: jnp.exp(logits),  # the chosen ones are divided by their sum below
    }[experts.scores]()
    rating = scores if correction is None else scores + correction
    groups = jnp.split(rating, experts.n_groups, axis=1)
    best = jnp.stack([jnp.sort(group)[:, -experts.scores_of_group :].sum(axis=1) for group in groups], axis=1)
    n_better = (best[:, None] > best[:, :, None]).sum(axis=2)  # [T, groups]
    kept = (n_better < experts.top_groups).repeat(experts.group_size, axis=1)
    chosen = jnp.argsort(-jnp.where(kept, rating, -jnp.inf))[:, : experts.top_k]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.renormalised or experts.scores == "softmax_of_chosen":
        weights = weights / weights.sum(axis=1, keepdims=True).clip(experts.least_sum)
    return weights * experts.multiplier, chosen


def _rotated(rotary: Rotary, x: jax.Array, position: jax.Array, n_positions: int) -> jax.Array:
    """Turn pair i of the first elements of x [T, N, D], as a complex number, by position * frequency i."""
    angle = position[:, None] * rotary.frequencies(n_positions)  # [T, size / 2]
    turn = (rotary.attention_factor * jnp.exp(1j * angle))[:, None]
    half = rotary.size // 2
    at = jnp.arange(half)
    real, imaginary = (2 * at, 2 * at + 1) if rotary.interleaved else (at, at + half)
    turned = (x[..., real] + 1j * x[..., imaginary]) * turn
    return x.at[..., real].set(turned.real).at[..., imaginary].set(turned.imag)


def _as_cached(code: KVCode | None, x: jax.Array) -> jax.Array:
    """Round each head's x [..., D] to multiples of a scale that makes its greatest the code's greatest."""
    if code is None:
        return x
    scale = jnp.abs(x).max(axis=-1, keepdims=True) / {"int8": 127, "fp8": 448}[code]
    scale = jnp.where(scale == 0, 1, scale)
    near = {"int8": jnp.round, "fp8": lambda each: each.astype(jnp.float8_e4m3fn).astype(jnp.float32)}[code]
    return near(x / scale) * scale


def _alibi_slopes(n_heads: int) -> list[float]:
    """A geometric series; heads beyond a power of two get every other slope of the next power's series."""
    if math.log2(n_heads).is_integer():
        return [(2 ** (-8 / n_heads)) ** (i + 1) for i in range(n_heads)]
    closest = 2 ** math.floor(math.log2(n_heads))
    return _alibi_slopes(closest) + _alibi_slopes(2 * closest)[0::2][: n_heads - closest]


def relative_buckets(relative: RelativeBias, n_tokens: int, *, causal: bool) -> np.ndarray:
    """The bucket [T, T] of each query and key, computed with integers where T5's code has logarithms.

    Of n buckets the first e = n / 2 hold one distance each. A larger distance d is in bucket e + i for the
    greatest i with d >= e (max_distance / e) ** (i / (n - e)).
    """
    n = relative.n_buckets if causal else relative.n_buckets // 2
    e = n // 2

    def bucket(distance: int) -> int:  # from a query to a key before it
        is_later = not causal and distance < 0
        d = max(distance, 0) if causal else abs(distance)
        if d >= e:
            passed = (d ** (n - e) * e**i >= relative.max_distance**i * e ** (n - e) for i in range(1, n - e))
            d = e + sum(passed)
        return d + n * is_later

    by_distance = np.array([bucket(distance) for distance in range(-n_tokens + 1, n_tokens)])
    position = np.arange(n_tokens)
    return by_distance[position[:, None] - position + n_tokens - 1]
