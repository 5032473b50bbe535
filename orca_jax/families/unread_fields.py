"""Decides about fields of a config.json that a family does not read: they are ignored, or refused by name.

A model computes what transformers' code for its model_type computes, which a field that this code does not
read cannot change. Such a field is ignored, and named once when the model is loaded. The exception is a field
whose name stands for a computation, such as a window of attention or a factor on logits: the model may have
been trained with code that has it. Such a field is refused, unless its value turns the computation off.

Words for sizes are not harmful: the shapes of all tensors are checked, and no tensor may be left over.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Common fields that do not change logits. They are not named at load.
_HARMLESS: Mapping[str, str] = {  # names by the reason
    "checked where a file is read": "architectures model_type is_encoder_decoder",
    "where the file comes from": """
        transformers_version _name_or_path name_or_path _commit_hash unsloth_version
    """,
    "the dtype of the stored weights; --dtype says what the engine computes in": "torch_dtype dtype",
    "another way to compute the same; the softmax is in float32 in any case": """
        attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        _experts_implementation_internal pretraining_tp use_cache cache_implementation
        chunk_size_feed_forward torchscript reorder_and_upcast_attn attention_softmax_in_fp32
        scale_attention_softmax_in_fp32
    """,
    "special tokens, which are read where they are needed": """
        bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id
    """,
    "the tokenizer's own files decide": "tokenizer_class prefix",
    "what transformers returns besides the logits": """
        output_hidden_states output_attentions output_past output_router_logits return_dict
        return_dict_in_generate output_scores
    """,
    "the head of a classifier, or settings of a task": """
        problem_type id2label label2id num_labels _num_labels finetuning_task task_specific_params
        summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
        summary_last_dropout is_decoder tf_legacy_loss
    """,
    "training": "gradient_checkpointing init_std",
    "defaults of generation, which are generation_config.json's or read by a family with an encoder": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens decoder_start_token_id
        forced_bos_token_id forced_eos_token_id
    """,
}
HARMLESS = {name: why for why, names in _HARMLESS.items() for name in names.split()}

# Words that make a name harmless, whatever its other words are; names with the first ones are common.
_TRAINING = re.compile(r"\w*dropout|\w*pdrop|\w*layerdrop|initializer|loss|jitter|aux")
_OPEN_WORDS: Mapping[str, str] = {
    r"neftune|gradient": "training",
    r"flash|fused|fusion|implementation|compile": "another way to compute the same",
}
_OPEN_ENDING = re.compile(r"(^|_)token(_ids?|_index)?$")  # a special token

# Names with a harmful word that are ignored nevertheless, since transformers reads them in no family that has
# them. They are named at load. A family can have more (Family.unread).
UNREAD: Mapping[str, str] = {
    "activation": "repeats hidden_act in Falcon 3; the family that has `activation` reads it",
    "activation_function": "repeats hidden_act; the families that have `activation_function` read it",
    "attn_factor": "yarn's factor in files for other engines; transformers reads attention_factor",
    "global_step": "the trainer's counter",
    "keys_to_ignore_at_inference": "what transformers returns besides the logits",
}


@dataclass(frozen=True, slots=True)
class Harm:
    """A computation that a field may change: the words of its name, and values that turn it off.

    `words` is a regular expression for one word. Null, false and empty values turn off every field.
    """

    words: str
    changes: str
    neutral: tuple[object, ...] = ()


HARMFUL: tuple[Harm, ...] = (
    Harm(
        r"m?rope|rotary|rot|yarn|ntk|theta|interleaved?|positions?|positional|pos|posemb|sinusoidal|alibi"
        r"|relative|rel|landmark",
        "how positions are encoded",
        ("default", 1.0),
    ),
    Harm(
        r"attn|attentions?|heads?|windows?|windowed|sliding|swa|sinks?|causal|bidirectional|chunk(s|ed)?|local"
        r"|global|sparse|sparsity|index|indexer|compress(ed)?|hash(es)?|buckets?|qk|qkv|kv|q|k|v|o|query"
        r"|queries|keys?|values?|latent|mask|masked|cross|mqa|gqa|mla|nope|mem|mems|memory",
        "which tokens attend to which, and how",
        (0,),
    ),
    Harm(
        r"m?scal(e|es|ed|ing|ar)|rescale|multiplier|factor|cap|soft|softcap(ping)?|clip(ped)?|clamp|limit"
        r"|temperature|mup|mu|alpha|beta|gamma|lambda|logits?",
        "a factor or a bound in the computation",
        (1.0,),
    ),
    Harm(
        r"norms?|prenorm|postnorm|layernorms?|rmsnorm|ln|normali[sz](e|ed|ation)|eps|epsilon|affine",
        "the norms",
    ),
    Harm(r"bias|biases", "biases"),
    Harm(
        r"acts?|activations?|afn|fn|inner|gelu|silu|relu|glu|swiglu|geglu|gat(e|es|ed|ing)|mlps?|ffn|ff|feed"
        r"|feedforward",
        "the feed-forward layers",
    ),
    Harm(
        r"residual|skip|parallel|layers?|layerwise|depth|blocks?|repeats?|loops?|cycles?|exit|recurrent"
        r"|recurrence|hc|altup|laurel|ple|ngram|engram|deepstack|stack|architecture",
        "how the layers are connected",
        (0,),
    ),
    Harm(
        r"experts?|moe|moa|mod|rout(e|es|ed|er|ers|ing)|topk|scor(e|es|ing)|dense|capacity|share(d)?|groups?"
        r"|mixture",
        "experts and how they are chosen",
        (0,),
    ),
    Harm(
        r"mamba\d?|ssm|ssd|s?conv|conv\w*d|states?|time\d?|dt|delta|deltanet|linear|rwkv|hyena|retention|kda"
        r"|gla|expand|mixer",
        "layers that are not attention",
        (0,),
    ),
    Harm(r"tie|tied|untie", "which weights are the same"),
    Harm(
        r"quant|quanti[sz](e|ed|er|ation)|compression|bits|awq|gptq|bnb|int4|int8|fp8|w4a16|w8a8",
        "how the weights are stored",
    ),
    Harm(r"loras?|adapters?|peft|ia3|dora", "an adapter", (0,)),
    Harm(r"diffusion|mtp|medusa|eagle|draft", "what the head predicts", (0,)),
)
# Harmful names without a harmful word.
_HARMFUL_NAMES: Mapping[str, Harm] = {
    **dict.fromkeys(
        ("dim_model_base", "unpadded_vocab_size", "output_vocab_size"), Harm("", "the logits", (0,))
    ),
    **dict.fromkeys(
        ("prefix_lm", "same_length", "bi_data", "reuse_len"),
        Harm("", "which tokens attend to which", (-1, 0)),
    ),
    **dict.fromkeys(
        ("text_config", "encoder", "decoder", "encoder_config", "decoder_config"),
        Harm("", "the sizes of a part that is described by itself"),
    ),
    **dict.fromkeys(("use_prompt", "use_long_context", "slow_but_exact"), Harm("", "the computation")),
}


def is_common(name: str) -> bool:
    """Whether a field is in so many files that naming it would be noise."""
    return name in HARMLESS or any(_TRAINING.fullmatch(word) for word in words_of(name))


def says_nothing(value: object) -> bool:
    """Whether a value turns off every field: null, false, or empty."""
    return value is None or value is False or value in ("", [], {})


def words_of(name: str) -> list[str]:
    """Split a field's name into lower-case words at underscores, dots and capitals."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return [word for word in re.split(r"[^a-z0-9]+", apart) if word]


def harm_of(name: str, value: object) -> Harm | None:
    """The computation that an unread field may change, by its name and value; None if harmless."""
    if is_common(name) or says_nothing(value):
        return None
    words = words_of(name)
    if _OPEN_ENDING.search(name) or any(re.fullmatch(open_, word) for open_ in _OPEN_WORDS for word in words):
        return None
    harm = _HARMFUL_NAMES.get(name) or next(
        (harm for harm in HARMFUL if any(re.fullmatch(harm.words, word) for word in words)), None
    )
    if harm is None or (not isinstance(value, bool) and value in harm.neutral):
        return None
    return harm
