"""Published mixtures of experts."""

from dataclasses import replace

from orca_jax.families.attention_config import Attention, Latent, Scores, latent_attention
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.gpt_oss import BASE, YARN
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig, alike
from orca_jax.families.norm_config import Norm
from orca_jax.families.presets.dense import mistral_7b, with_layers
from orca_jax.families.rotary import Rotary, Scaling


def with_experts(model: ModelConfig, *, number: int, top_k: int) -> ModelConfig:
    """The model with such experts, of its feed-forward size, in every layer."""
    layer = model.layers[0]
    experts = Experts(number=number, top_k=top_k, renormalised=True)
    return with_layers(model, replace(layer, feed_forward=replace(layer.feed_forward, experts=experts)))


def gpt_oss(*, n_layers: int, n_experts: int) -> ModelConfig:
    """gpt-oss-20b or -120b: a window of 128 in every other layer, from the first on."""
    windowed = Layer(
        attention=Attention(
            n_heads=64,
            n_kv_heads=8,
            head_size=64,
            rotary=Rotary(size=64, base=BASE, scaling=YARN),
            scores=Scores(window=128, sinks=True),
        ),
        feed_forward=FeedForward(
            size=2880,
            activation="silu",
            gated=True,
            gate_limit=7.0,
            experts=Experts(number=n_experts, top_k=4, scores="softmax_of_chosen", router_bias=True),
        ),
        norm=Norm(kind="rms_norm", eps=1e-5),
    )
    whole = replace(windowed, attention=replace(windowed.attention, scores=Scores(sinks=True)))
    return ModelConfig(
        vocab_size=201_088,
        n_positions=131_072,
        hidden_size=2880,
        layers=(windowed, whole) * (n_layers // 2),
        embedding=Embedding(size=2880, tied=False),
        positions=None,
        final_norm=windowed.norm,
        eos_token_ids=(200_002,),
    )


def mixtral_8x7b() -> ModelConfig:
    """Mixtral 8x7B: Mistral without a window, with eight experts."""
    model = mistral_7b()
    layer = model.layers[0]
    attention = replace(layer.attention, scores=Scores(), rotary=Rotary(size=128, base=1e6))
    return with_experts(with_layers(model, replace(layer, attention=attention)), number=8, top_k=2)


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3 and R1, without what predicts a further token: 671 billion parameters, 37 active."""
    scaling = Scaling(kind="yarn", factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    rotary = Rotary(size=64, interleaved=True, scaling=scaling)
    latent = Latent(rank=512, rotary_size=64, plain_size=128, value_size=128, query_rank=1536)
    attention = latent_attention(
        latent,
        n_heads=128,
        rotary=rotary,
        scores=Scores(scale=latent.query_size**-0.5 * rotary.score_factor),
        qkv_bias=False,
        out_bias=False,
    )
    experts = Experts(
        number=256,
        top_k=8,
        scores="sigmoid",
        renormalised=True,
        multiplier=2.5,
        correction_bias=True,
        n_groups=8,
        top_groups=4,
        shared_size=2048,
    )
    dense = FeedForward(size=18_432, activation="silu", gated=True, bias=False)
    norm = Norm(kind="rms_norm", eps=1e-6)
    first = Layer(attention=attention, feed_forward=dense, norm=norm)
    sparse = replace(first, feed_forward=replace(dense, size=2048, experts=experts))
    return ModelConfig(
        vocab_size=129_280,
        n_positions=163_840,
        hidden_size=7168,
        layers=(*alike(first, 3), *alike(sparse, 58)),
        embedding=Embedding(size=7168, tied=False),
        positions=None,
        final_norm=norm,
        bos_token_id=0,
        eos_token_ids=(1,),
    )
