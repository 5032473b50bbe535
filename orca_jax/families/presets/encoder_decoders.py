"""T5 and BART."""

from dataclasses import replace

from orca_jax.families.attention_config import Attention, RelativeBias, Scores
from orca_jax.families.model_config import (
    Embedding,
    Encoder,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
)
from orca_jax.families.norm_config import Norm


def t5(
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


def bart_large() -> ModelConfig:
    """BART large."""
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
