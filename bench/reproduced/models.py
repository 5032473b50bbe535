"""The papers' models that are no presets, by their published config.json."""

from orca_jax.families.hf_config import model_of

OPT_13B = model_of(
    {
        "model_type": "opt",
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
        "hidden_size": 5120,
        "word_embed_proj_dim": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "ffn_dim": 20_480,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
    }
)
YI_34B = model_of(
    {
        "model_type": "llama",
        "vocab_size": 64_000,
        "max_position_embeddings": 200_000,
        "hidden_size": 7168,
        "num_hidden_layers": 60,
        "num_attention_heads": 56,
        "num_key_value_heads": 8,
        "intermediate_size": 20_480,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
