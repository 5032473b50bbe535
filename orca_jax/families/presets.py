"""Shapes by name: the demo model, two of GPT-2, the models of the paper's Table 1, and published decoders.

A preset has no weights: `--load-format dummy` draws them at random. Published decoders are the base models;
the tests compare them with what the families read from the published config.json.
"""

from dataclasses import replace

from orca_jax.families.attention_config import Attention, QKNorm, RelativeBias, Scores
from orca_jax.families.gpt_config import gpt_config
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import (
    Embedding,
    Encoder,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
)
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary, Scaling

_GPT2_END_OF_TEXT = 50256


def _gpt2(*, hidden_size: int, n_layers: int, n_heads: int) -> ModelConfig:
    return gpt_config(
        vocab_size=50257,
        n_positions=1024,
        hidden_size=hidden_size,
        n_layers=n_layers,
        n_heads=n_heads,
        ffn_size=4 * hidden_size,
        bos_token_id=_GPT2_END_OF_TEXT,
        eos_token_ids=(_GPT2_END_OF_TEXT,),
    )


def _gpt3(*, hidden_size: int, n_layers: int) -> ModelConfig:
    """A model of Table 1: heads of 128, 2048 positions, GPT-2's vocabulary padded for hardware and shards."""
    return gpt_config(
        vocab_size=50257,
        n_positions=2048,
        hidden_size=hidden_size,
        n_layers=n_layers,
        n_heads=hidden_size // 128,
        ffn_size=4 * hidden_size,
        vocab_multiple=128,
        bos_token_id=_GPT2_END_OF_TEXT,
        eos_token_ids=(_GPT2_END_OF_TEXT,),
    )


def _llama_like(
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


def _with_layers(model: ModelConfig, layer: Layer) -> ModelConfig:
    return replace(model, layers=(layer,) * model.n_layers)


def _llama3(
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
    return _llama_like(
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


def _qwen3(
    *, hidden_size: int, n_layers: int, n_heads: int, ffn_size: int, n_kv_heads: int = 8, tied: bool = False
) -> ModelConfig:
    model = _llama_like(
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
    return _with_layers(model, replace(layer, attention=attention))


def _gemma3(
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


def _mistral_7b() -> ModelConfig:
    model = _llama_like(
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
    return _with_layers(model, replace(layer, attention=replace(layer.attention, scores=Scores(window=4096))))


def _with_experts(model: ModelConfig, *, number: int, top_k: int) -> ModelConfig:
    layer = model.layers[0]
    experts = Experts(number=number, top_k=top_k, renormalised=True)
    return _with_layers(model, replace(layer, feed_forward=replace(layer.feed_forward, experts=experts)))


def _mixtral_8x7b() -> ModelConfig:
    model = _mistral_7b()
    layer = model.layers[0]
    attention = replace(layer.attention, scores=Scores(), rotary=Rotary(size=128, base=1e6))
    return _with_experts(_with_layers(model, replace(layer, attention=attention)), number=8, top_k=2)


def _olmo2_7b() -> ModelConfig:
    model = _llama_like(
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
    return _with_layers(model, replace(layer, attention=attention, residual="after"))


def _t5(
    *,
    hidden_size: int,
    n_layers: int,
    n_heads: int,
    ffn_size: int,
    head_size: int = 64,
    version_1_1: bool = False,
) -> ModelConfig:
    """T5; version 1.1, as FLAN-T5, has gated feed-forwards and a head of its own."""
    norm = Norm(kind="rms_norm", eps=1e-6)
    causal = Attention(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=head_size,
        qkv_bias=False,
        out_bias=False,
        scores=Scores(scale=1.0, relative=RelativeBias(shared=True)),
    )
    feed_forward = FeedForward(
        size=ffn_size, activation="gelu_tanh" if version_1_1 else "relu", gated=version_1_1, bias=False
    )
    both_ways = replace(causal, causal=False)
    encoding = Layer(attention=both_ways, feed_forward=feed_forward, norm=norm)
    cross = replace(both_ways, scores=Scores(scale=1.0))
    return ModelConfig(
        vocab_size=32_128,
        n_positions=2048,
        hidden_size=hidden_size,
        layers=(replace(encoding, attention=causal, cross=cross),) * n_layers,
        embedding=Embedding(size=hidden_size, tied=not version_1_1),
        positions=None,
        final_norm=norm,
        logit_multiplier=1.0 if version_1_1 else hidden_size**-0.5,
        eos_token_ids=(1,),
        encoder=Encoder(layers=(encoding,) * n_layers, n_positions=2048, final_norm=norm),
        decoder_start_token_id=0,
    )


def _bart_large() -> ModelConfig:
    norm = Norm()
    causal = Attention(n_heads=16, n_kv_heads=16, head_size=64)
    encoding = Layer(
        attention=replace(causal, causal=False),
        feed_forward=FeedForward(size=4096, activation="gelu"),
        residual="post",
    )
    positions = LearnedPositions(offset=2)
    return ModelConfig(
        vocab_size=50_265,
        n_positions=1024,
        hidden_size=1024,
        layers=(replace(encoding, attention=causal, cross=encoding.attention),) * 12,
        embedding=Embedding(size=1024, norm=norm),
        positions=positions,
        final_norm=None,
        head_bias=True,
        bos_token_id=0,
        eos_token_ids=(2,),
        encoder=Encoder(layers=(encoding,) * 12, n_positions=1024, positions=positions, embedding_norm=norm),
        decoder_start_token_id=2,
        forced_bos_token_id=0,
        forced_eos_token_id=2,
    )


PRESETS: dict[str, ModelConfig] = {
    "demo": gpt_config(
        vocab_size=2048,
        n_positions=512,
        hidden_size=256,
        n_layers=4,
        n_heads=4,
        ffn_size=1024,
        bos_token_id=0,
        eos_token_ids=(0,),
    ),
    "gpt2": _gpt2(hidden_size=768, n_layers=12, n_heads=12),  # 124M
    "gpt2-xl": _gpt2(hidden_size=1600, n_layers=48, n_heads=25),  # 1.6B
    "gpt3-13b": _gpt3(hidden_size=5120, n_layers=40),
    "gpt3-101b": _gpt3(hidden_size=10240, n_layers=80),
    "gpt3-175b": _gpt3(hidden_size=12288, n_layers=96),
    "gpt3-341b": _gpt3(hidden_size=15360, n_layers=120),
    "llama-3.2-1b": _llama3(
        hidden_size=2048, n_layers=16, n_heads=32, head_size=64, ffn_size=8192, factor=32.0, tied=True
    ),
    "llama-3.1-8b": _llama3(hidden_size=4096, n_layers=32, n_heads=32, ffn_size=14_336),
    "llama-3.1-70b": _llama3(hidden_size=8192, n_layers=80, n_heads=64, ffn_size=28_672),
    "llama-3.1-405b": _llama3(hidden_size=16_384, n_layers=126, n_heads=128, ffn_size=53_248),
    "qwen3-0.6b": _qwen3(hidden_size=1024, n_layers=28, n_heads=16, ffn_size=3072, tied=True),
    "qwen3-8b": _qwen3(hidden_size=4096, n_layers=36, n_heads=32, ffn_size=12_288),
    "qwen3-32b": _qwen3(hidden_size=5120, n_layers=64, n_heads=64, ffn_size=25_600),
    "gemma-3-1b": _gemma3(
        vocab_size=262_144,
        n_positions=32_768,
        hidden_size=1152,
        n_layers=26,
        n_heads=4,
        n_kv_heads=1,
        head_size=256,
        ffn_size=6912,
        query_scalar=256,
        window=512,
    ),
    "gemma-3-27b": _gemma3(
        vocab_size=262_208,
        n_positions=131_072,
        hidden_size=5376,
        n_layers=62,
        n_heads=32,
        n_kv_heads=16,
        head_size=128,
        ffn_size=21_504,
        query_scalar=168,
        window=1024,
        scaling=Scaling(kind="linear", factor=8.0),
    ),
    "mistral-7b-v0.1": _mistral_7b(),
    "phi-4": _llama_like(
        vocab_size=100_352,
        n_positions=16_384,
        hidden_size=5120,
        n_layers=40,
        n_heads=40,
        n_kv_heads=10,
        ffn_size=17_920,
        rotary_base=250_000.0,
        bos_token_id=100_257,
        eos_token_id=100_265,
    ),
    "olmo-2-7b": _olmo2_7b(),
    "mixtral-8x7b": _mixtral_8x7b(),
    "qwen3-30b-a3b": _with_experts(
        _qwen3(hidden_size=2048, n_layers=48, n_heads=32, n_kv_heads=4, ffn_size=768), number=128, top_k=8
    ),
    "t5-small": _t5(hidden_size=512, n_layers=6, n_heads=8, ffn_size=2048),
    "t5-base": _t5(hidden_size=768, n_layers=12, n_heads=12, ffn_size=3072),
    "t5-large": _t5(hidden_size=1024, n_layers=24, n_heads=16, ffn_size=4096),
    "t5-3b": _t5(hidden_size=1024, n_layers=24, n_heads=32, ffn_size=16_384, head_size=128),
    "t5-11b": _t5(hidden_size=1024, n_layers=24, n_heads=128, ffn_size=65_536, head_size=128),
    "flan-t5-xl": _t5(hidden_size=2048, n_layers=24, n_heads=32, ffn_size=5120, version_1_1=True),
    "bart-large": _bart_large(),
}
