"""Says what an unsupported checkpoint is, another kind of model or quantised weights, and what to do.

The names are transformers' `model_type` and `quant_method`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from orca_jax.errors import LIKELY, closest
from orca_jax.families.strict_json import shown

_OF_IMAGES_AND_TEXT = "a model of images and text, and only the text of a few such models is served here"
_ENCODER = (
    "an encoder, and only BERT, RoBERTa, XLM-RoBERTa and ModernBERT are served here; a decoder "
    "such as Qwen3-Embedding makes embeddings too"
)
_OF_SPEECH = "a model of speech or sound; language models are served here"
_OF_IMAGES = "a model of images; language models are served here"
_RECURRENT = "a language model with recurrent layers, which are not built yet"

# The model_types of each kind.
_KINDS: Mapping[str, str] = {
    _OF_IMAGES_AND_TEXT: """
        aya_vision blip-2 chameleon cohere2_vision deepseek_vl deepseek_vl_v2 emu3 ernie4_5_vl_moe
        florence2 fuyu gemma3n glm4v glm4v_moe got_ocr2 idefics idefics2 idefics3 instructblip internvl
        internvl_chat janus kimi_vl kosmos-2 llava llava_next llava_next_video llava_onevision
        minicpmo minicpmv mllama molmo ovis2 paligemma phi3_v phi4_multimodal pixtral
        qwen2_5_omni qwen2_5_vl qwen2_vl qwen3_omni_moe qwen3_vl qwen3_vl_moe smolvlm video_llava vipllava
    """,
    _ENCODER: """
        albert camembert data2vec-text deberta deberta-v2 distilbert electra ernie esm eurobert
        flaubert gte ibert longformer luke mobilebert mpnet new nomic_bert roformer splinter
        squeezebert xlm xlm-roberta-xl xmod
    """,
    _OF_SPEECH: """
        audio-spectrogram-transformer bark clap csm encodec granite_speech hubert kyutai mimi moonshine
        musicgen parakeet_ctc qwen2_audio seamless_m4t seamless_m4t_v2 speech_to_text speecht5 ultravox
        vits voxtral wav2vec2 wav2vec2-bert wavlm whisper
    """,
    _OF_IMAGES: """
        align beit blip clip clipseg convnext convnextv2 deit depth_anything detr dinov2 dinov3_vit dpt
        efficientnet mask2former mobilenet_v2 mobilevit owlv2 owlvit resnet rt_detr sam sam2 segformer
        siglip siglip2 swin swinv2 trocr vit vit_mae vitdet vitpose yolos
    """,
    _RECURRENT: """
        falcon_mamba jamba kimi_linear mamba mamba2 minimax olmo_hybrid
        recurrent_gemma rwkv xlstm zamba zamba2
    """,
}
_KIND_OF = {model_type: kind for kind, types in _KINDS.items() for model_type in types.split()}

_METHODS: Mapping[str, str] = {
    "bitsandbytes": "bitsandbytes",
    "fbgemm_fp8": "FBGEMM's FP8",
    "mxfp4": "MXFP4",
    "modelopt": "NVIDIA's Model Optimizer",
    "torchao": "torchao",
    "quanto": "Quanto",
    "hqq": "HQQ",
    "eetq": "EETQ",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "spqr": "SpQR",
    "bitnet": "BitNet",
    "auto-round": "AutoRound",
    "quark": "AMD's Quark",
}
# The class of transformers that loads such weights as bfloat16.
_DEQUANTISED: Mapping[str, str] = {"mxfp4": "Mxfp4Config"}


def about_model_type(model_type: str, values: Mapping[str, Any], known: Collection[str]) -> str:
    """The end of an error about an unknown model_type; empty if nothing is known about it."""
    kind = _KIND_OF.get(model_type)
    if kind is None:
        begins = [each for each in known if model_type.startswith(each)]  # qwen2_5 is nearer to qwen2
        name = closest(model_type, begins, at_least=LIKELY) or closest(model_type, known, at_least=LIKELY)
        return f"; the closest of these is {name}" if name else ""
    section = values.get("text_config")
    text = section.get("model_type") if isinstance(section, dict) else None
    inner = (
        f"; its text part is a {shown(text)}" if kind is _OF_IMAGES_AND_TEXT and isinstance(text, str) else ""
    )
    return f", {kind}{inner}"


def about_quantisation(section: Mapping[str, Any]) -> str:
    """The message for weights that are quantised in a way that is not read."""
    method, bits = section.get("quant_method"), section.get("bits")
    name = (
        _METHODS.get(method, shown(method)) if isinstance(method, str) else "a method that it does not name"
    )
    size = f" in {shown(bits)} bits" if bits is not None else ""
    config = _DEQUANTISED.get(method) if isinstance(method, str) else None
    more = ""
    if config is not None:
        more = f", or load these with transformers and {config}(dequantize=True) and save them"
    return (
        f"quantization_config is set: its weights are quantised by {name}{size} (quant_method "
        f"{shown(method)}), and such weights of this model are not read yet. Use the model with its original "
        f"weights{more}"
    )
