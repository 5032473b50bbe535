"""Published decoders without experts."""

from dataclasses import replace

from orca_jax.families.attention_config import Attention, QKNorm, Scores
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary, Scaling


def llama_like(
    *,
    vocab_size: int,
    n_positions: int,
    hidden_size: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    ffn_size: int,
    rotary_base: float,
    head_size: int = 128,
    scaling: Scaling | None = None,
    eps: float = 1e-5,
    tied: bool = False,
    bos_token_id: int | None,
    eos_token_id: int,
) -> ModelConfig:
    """Llama: RMSNorm, rotary positions, gated feed-forward with SiLU, no biases."""
    norm = Norm(kind="rms_norm", eps=eps)
    layer = Layer(
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_size=head_size,
            qkv_bias=False,
            out_bias=False,
            rotary=Rotary(size=head_size, base=rotary_base, scaling=scaling),
        ),
        feed_forward=FeedForward(size=ffn_size, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=vocab_size,
        n_positions=n_positions,
        hidden_size=hidden_size,
        layers=(layer,) * n_layers,
        embedding=Embedding(size=hidden_size, tied=tied),
        positions=None,
        final_norm=norm,
        bos_token_id=bos_token_id,
        eos_token_ids=(eos_token_id,),
    )


def with_layers(model: ModelConfig, layer: Layer) -> ModelConfig:
    """The model with all its layers alike."""
    return replace(model, layers=(layer,) * model.n_layers)


def llama3(
    *,
    hidden_size: int,
    n_layers: int,
    n_heads: int,
    ffn_size: int,
    factor: float = 8.0,
    head_size: int = 128,
    tied: bool = False,
) -> ModelConfig:
    """Llama 3.1 and 3.2."""
    return llama_like(
        vocab_size=128_256,
        n_positions=131_072,
        hidden_size=hidden_size,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_size=head_size,
        ffn_size=ffn_size,
        rotary_base=500_000.0,
        scaling=Scaling(
            kind="llama3", factor=factor, original_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
        ),
        tied=tied,
        bos_token_id=128_000,
        eos_token_id=128_001,
    )


def qwen3(
    *, hidden_size: int, n_layers: int, n_heads: int, ffn_size: int, n_kv_heads: int = 8, tied: bool = False
) -> ModelConfig:
    """Qwen 3."""
    model = llama_like(
        vocab_size=151_936,
        n_positions=40_960,
        hidden_size=hidden_size,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_size=ffn_size,
        rotary_base=1e6,
        eps=1e-6,
        tied=tied,
        bos_token_id=151_643,
        eos_token_id=151_645,
    )
    layer = model.layers[0]
    attention = replace(layer.attention, qk_norm=QKNorm(norm=layer.norm))
    return with_layers(model, replace(layer, attention=attention))


def gemma3(
    *,
    vocab_size: int,
    n_positions: int,
    hidden_size: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_size: int,
    ffn_size: int,
    query_scalar: int,
    window: int,
    scaling: Scaling | None = None,
) -> ModelConfig:
    """Gemma 3, text alone: every sixth layer sees all tokens, the others a window."""
    norm = Norm(kind="rms_norm", eps=1e-6, unit_offset=True)
    attention = Attention(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        qkv_bias=False,
        out_bias=False,
        qk_norm=QKNorm(norm=norm),
        rotary=Rotary(size=head_size, base=1e6, scaling=scaling),
        scores=Scores(scale=query_scalar**-0.5),
    )
    full = Layer(
        attention=attention,
        feed_forward=FeedForward(size=ffn_size, activation="gelu_tanh", gated=True, bias=False),
        norm=norm,
        residual="both",
    )
    local = replace(
        full,
        attention=replace(
            attention,
            rotary=Rotary(size=head_size, base=1e4),
            scores=replace(attention.scores, window=window),
        ),
    )
    return ModelConfig(
        vocab_size=vocab_size,
        n_positions=n_positions,
        hidden_size=hidden_size,
        layers=tuple(local if i % 6 else full for i in range(1, n_layers + 1)),
        embedding=Embedding(size=hidden_size, multiplier=hidden_size**0.5),
        positions=None,
        final_norm=norm,
        bos_token_id=2,
        eos_token_ids=(1,),
    )


def mistral_7b() -> ModelConfig:
    """Mistral 7B v0.1, whose layers have a window."""
    model = llama_like(
        vocab_size=32_000,
        n_positions=32_768,
        hidden_size=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_size=14_336,
        rotary_base=10_000.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    layer = model.layers[0]
    return with_layers(model, replace(layer, attention=replace(layer.attention, scores=Scores(window=4096))))


def olmo2_7b() -> ModelConfig:
    """OLMo 2: norms after attention and feed-forward, and over all queries and keys."""
    model = llama_like(
        vocab_size=100_352,
        n_positions=4096,
        hidden_size=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        ffn_size=11_008,
        rotary_base=500_000.0,
        eps=1e-6,
        bos_token_id=None,
        eos_token_id=100_257,
    )
    layer = model.layers[0]
    attention = replace(layer.attention, qk_norm=QKNorm(norm=layer.norm, over="width"))
    return with_layers(model, replace(layer, attention=attention, residual="after"))
