"""Every preset by its name.

The tests compare published decoders with what the families read from the published config.json.
"""

from orca_jax.families.gpt_config import gpt_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets.dense import gemma3, llama3, llama_like, mistral_7b, olmo2_7b, qwen3
from orca_jax.families.presets.encoder_decoders import bart_large, t5
from orca_jax.families.presets.gpt import gpt2, gpt3
from orca_jax.families.presets.mixtures import deepseek_v3, gpt_oss, mixtral_8x7b, with_experts
from orca_jax.families.rotary import Scaling

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
    "gpt2": gpt2(hidden_size=768, n_layers=12, n_heads=12),  # 124M
    "gpt2-xl": gpt2(hidden_size=1600, n_layers=48, n_heads=25),  # 1.6B
    "gpt3-13b": gpt3(hidden_size=5120, n_layers=40),
    "gpt3-101b": gpt3(hidden_size=10240, n_layers=80),
    "gpt3-175b": gpt3(hidden_size=12288, n_layers=96),
    "gpt3-341b": gpt3(hidden_size=15360, n_layers=120),
    "llama-3.2-1b": llama3(
        hidden_size=2048, n_layers=16, n_heads=32, head_size=64, ffn_size=8192, factor=32.0, tied=True
    ),
    "llama-3.1-8b": llama3(hidden_size=4096, n_layers=32, n_heads=32, ffn_size=14_336),
    "llama-3.1-70b": llama3(hidden_size=8192, n_layers=80, n_heads=64, ffn_size=28_672),
    "llama-3.1-405b": llama3(hidden_size=16_384, n_layers=126, n_heads=128, ffn_size=53_248),
    "qwen3-0.6b": qwen3(hidden_size=1024, n_layers=28, n_heads=16, ffn_size=3072, tied=True),
    "qwen3-8b": qwen3(hidden_size=4096, n_layers=36, n_heads=32, ffn_size=12_288),
    "qwen3-32b": qwen3(hidden_size=5120, n_layers=64, n_heads=64, ffn_size=25_600),
    "gemma-3-1b": gemma3(
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
    "gemma-3-27b": gemma3(
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
    "mistral-7b-v0.1": mistral_7b(),
    "phi-4": llama_like(
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
    "olmo-2-7b": olmo2_7b(),
    "mixtral-8x7b": mixtral_8x7b(),
    "qwen3-30b-a3b": with_experts(
        qwen3(hidden_size=2048, n_layers=48, n_heads=32, n_kv_heads=4, ffn_size=768), number=128, top_k=8
    ),
    "gpt-oss-20b": gpt_oss(n_layers=24, n_experts=32),
    "gpt-oss-120b": gpt_oss(n_layers=36, n_experts=128),
    "gpt-oss-20b-mxfp4": gpt_oss(n_layers=24, n_experts=32).with_packed_experts(),
    "gpt-oss-120b-mxfp4": gpt_oss(n_layers=36, n_experts=128).with_packed_experts(),
    "deepseek-v3": deepseek_v3(),
    "t5-small": t5(hidden_size=512, n_layers=6, n_heads=8, ffn_size=2048),
    "t5-base": t5(hidden_size=768, n_layers=12, n_heads=12, ffn_size=3072),
    "t5-large": t5(hidden_size=1024, n_layers=24, n_heads=16, ffn_size=4096),
    "t5-3b": t5(hidden_size=1024, n_layers=24, n_heads=32, ffn_size=16_384, head_size=128),
    "t5-11b": t5(hidden_size=1024, n_layers=24, n_heads=128, ffn_size=65_536, head_size=128),
    "flan-t5-xl": t5(hidden_size=2048, n_layers=24, n_heads=32, ffn_size=5120, version_1_1=True),
    "bart-large": bart_large(),
}
