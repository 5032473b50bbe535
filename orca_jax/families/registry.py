"""The known families by the model_type of config.json."""

from collections.abc import Mapping
from types import MappingProxyType

from orca_jax.errors import ConfigError
from orca_jax.families.decoders.apertus import APERTUS
from orca_jax.families.decoders.arcee import ARCEE
from orca_jax.families.decoders.bamba import BAMBA
from orca_jax.families.decoders.bloom import BLOOM
from orca_jax.families.decoders.cohere2 import COHERE2
from orca_jax.families.decoders.eleuther import GPT_NEOX, GPTJ
from orca_jax.families.decoders.ernie4_5 import ERNIE4_5
from orca_jax.families.decoders.exaone4 import EXAONE4
from orca_jax.families.decoders.falcon import FALCON
from orca_jax.families.decoders.falcon_h1 import FALCON_H1
from orca_jax.families.decoders.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_TEXT
from orca_jax.families.decoders.gemma4 import GEMMA4, GEMMA4_TEXT
from orca_jax.families.decoders.glm4 import GLM4
from orca_jax.families.decoders.gpt2 import GPT2
from orca_jax.families.decoders.granite import GRANITE
from orca_jax.families.decoders.hunyuan import HUNYUAN_V1_DENSE
from orca_jax.families.decoders.lfm2 import LFM2
from orca_jax.families.decoders.llama import LLAMA
from orca_jax.families.decoders.mistral import MINISTRAL3, MISTRAL
from orca_jax.families.decoders.olmo2 import OLMO2
from orca_jax.families.decoders.olmo3 import OLMO3
from orca_jax.families.decoders.opt import OPT
from orca_jax.families.decoders.phi3 import PHI3
from orca_jax.families.decoders.qwen import QWEN2, QWEN3
from orca_jax.families.decoders.seed_oss import SEED_OSS
from orca_jax.families.decoders.smollm3 import SMOLLM3
from orca_jax.families.decoders.starcoder2 import STARCODER2
from orca_jax.families.encoder_decoders.bart import BART, MBART, PEGASUS
from orca_jax.families.encoder_decoders.t5 import MT5, T5, UMT5
from orca_jax.families.encoders.bert import BERT, ROBERTA, XLM_ROBERTA
from orca_jax.families.encoders.modernbert import MODERNBERT
from orca_jax.families.family import Family
from orca_jax.families.mixtures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K25
from orca_jax.families.mixtures.ernie4_5_moe import ERNIE4_5_MOE
from orca_jax.families.mixtures.flex_olmo import FLEX_OLMO
from orca_jax.families.mixtures.glm4_moe import GLM4_MOE, GLM4_MOE_LITE
from orca_jax.families.mixtures.gpt_oss import GPT_OSS
from orca_jax.families.mixtures.granite_hybrid import GRANITE_HYBRID
from orca_jax.families.mixtures.indexed import DEEPSEEK_V32, GLM_MOE_DSA
from orca_jax.families.mixtures.lfm2_moe import LFM2_MOE
from orca_jax.families.mixtures.llama4 import LLAMA4, LLAMA4_TEXT
from orca_jax.families.mixtures.minimax_m2 import MINIMAX_M2
from orca_jax.families.mixtures.mistral4 import MISTRAL3, MISTRAL4
from orca_jax.families.mixtures.mixtral import MIXTRAL
from orca_jax.families.mixtures.nemotron_h import NEMOTRON_H
from orca_jax.families.mixtures.olmoe import OLMOE
from orca_jax.families.mixtures.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from orca_jax.families.mixtures.qwen3_next import QWEN3_NEXT
from orca_jax.families.mixtures.qwen_moe import QWEN2_MOE, QWEN3_MOE

_families: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        OPT,
        LLAMA,
        MISTRAL,
        MINISTRAL3,
        MISTRAL3,
        GEMMA,
        GEMMA2,
        GEMMA3_TEXT,
        GEMMA3,
        GEMMA4_TEXT,
        GEMMA4,
        QWEN2,
        QWEN3,
        PHI3,
        STARCODER2,
        GRANITE,
        OLMO2,
        OLMO3,
        SMOLLM3,
        SEED_OSS,
        GLM4,
        COHERE2,
        EXAONE4,
        ERNIE4_5,
        ARCEE,
        APERTUS,
        HUNYUAN_V1_DENSE,
        GPT_NEOX,
        GPTJ,
        BLOOM,
        FALCON,
        LFM2,
        BAMBA,
        FALCON_H1,
        LLAMA4_TEXT,
        LLAMA4,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5_TEXT,
        QWEN3_5,
        QWEN3_5_MOE_TEXT,
        QWEN3_5_MOE,
        GRANITE_HYBRID,
        NEMOTRON_H,
        LFM2_MOE,
        OLMOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K25,
        MISTRAL4,
        GLM4_MOE,
        GLM4_MOE_LITE,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        MINIMAX_M2,
        ERNIE4_5_MOE,
        FLEX_OLMO,
        GPT_OSS,
        T5,
        MT5,
        UMT5,
        BART,
        MBART,
        PEGASUS,
        BERT,
        ROBERTA,
        XLM_ROBERTA,
        MODERNBERT,
    )
}

FAMILIES: Mapping[str, Family] = MappingProxyType(_families)


def register(family: Family) -> None:
    """Add a family in this process. Raises ConfigError where its model_type is known already."""
    if family.model_type in _families:
        raise ConfigError(f"a family of the model_type {family.model_type!r} is registered already")
    _families[family.model_type] = family
