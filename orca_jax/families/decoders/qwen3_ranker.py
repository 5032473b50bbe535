"""Qwen3 rerankers (Zhang et al., 2025), which read an instruction, a query and a document, and judge them.

As published a reranker is a Qwen3ForCausalLM: the relevance is the probability of "yes" against "no" as the
next token. Three files say so: `1_LogitScore/config.json` of Sentence Transformers, or in config.json
`is_original_qwen3_reranker` or `classifier_from_token`, as for vLLM and SGLang. A converted one is a
Qwen3ForSequenceClassification of one label, or of two, which stand for "no" and "yes".
"""

from pathlib import Path
from typing import Any, cast

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.model_config import ModelConfig, RankerHead
from orca_jax.families.strict_json import read_object, shown

CLASSIFIER = "Qwen3ForSequenceClassification"
LOGIT_SCORE = "1_LogitScore/config.json"
_ANSWERS = ("no", "yes")
_MAX_BYTES = 100_000
_MAX_TOKENIZER_BYTES = 100_000_000


def read_ranker(fields: ConfigFields) -> RankerHead | None:
    """Read how the model ranks; None for one that does not. Raises BadModelConfig or UnsupportedModel."""
    classifies = CLASSIFIER in (fields.texts("architectures") or ())
    original, answers = fields.flag("is_original_qwen3_reranker", False), fields.raw("classifier_from_token")
    stored = fields.path.parent / LOGIT_SCORE
    if original or answers is not None:
        return _by_tokens(fields, answers if answers is not None else [*_ANSWERS])
    if classifies:
        n_labels = fields.n_labels()
        if n_labels > 2:
            raise UnsupportedModel(
                f"{shown(fields.path)}: id2label has {n_labels} labels; only a classifier of one label or of "
                "two, which ranks pairs of texts, is supported"
            )
        return RankerHead(kind="linear", n_results=n_labels)
    return _of_sentence_transformers(stored) if stored.exists() else None


def ranker_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_ranker` reads."""
    head = model.ranker_head
    if not model.ranker or head.kind == "pooler":
        return {}
    if head.kind == "tokens":
        return {"is_original_qwen3_reranker": True, "classifier_from_token": list(head.token_ids)}
    labels = {str(i): f"LABEL_{i}" for i in range(head.n_results)}
    return {"architectures": [CLASSIFIER], "id2label": labels}


def _by_tokens(fields: ConfigFields, answers: object) -> RankerHead:
    """The head that compares the logits of two tokens, "no" and "yes", given by text or id."""
    found = cast("list[object]", answers) if isinstance(answers, list) else []
    if len(found) != 2 or found[0] == found[1] or not all(_is_answer(each) for each in found):
        raise BadModelConfig(
            f"{shown(fields.path)}: classifier_from_token: expected two tokens, as in "
            f'["no", "yes"], found {shown(answers)}'
        )
    texts = [each for each in found if isinstance(each, str)]
    ids = _ids_of(texts, fields.path) if texts else {}
    return RankerHead(
        kind="tokens",
        n_results=2,
        token_ids=tuple(ids[each] if isinstance(each, str) else cast("int", each) for each in found),
    )


def _is_answer(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _ids_of(texts: list[str], config: Path) -> dict[str, int]:
    """The ids of tokens by their text, in the tokenizer.json next to config.json."""
    path = config.parent / "tokenizer.json"
    if not path.exists():
        raise BadModelConfig(
            f"{shown(config)}: classifier_from_token names tokens by their text, which needs a "
            "tokenizer.json next to it: copy it there, or give token ids"
        )
    model = read_object(path, _MAX_TOKENIZER_BYTES).get("model")
    vocabulary = cast("dict[str, object]", model).get("vocab") if isinstance(model, dict) else None
    ids = cast("dict[str, object]", vocabulary) if isinstance(vocabulary, dict) else {}
    found = dict[str, int]()
    for text in texts:
        token_id = ids.get(text)
        if not isinstance(token_id, int):
            raise BadModelConfig(
                f"{shown(path)} has no token {shown(text)}, which classifier_from_token of {shown(config)} "
                "compares"
            )
        found[text] = token_id
    return found


def _of_sentence_transformers(path: Path) -> RankerHead:
    """The head that `1_LogitScore/config.json` describes: the logit of one token minus that of another."""
    values = read_object(path, _MAX_BYTES)
    found = [values.get(name) for name in ("false_token_id", "true_token_id")]
    if not all(isinstance(each, int) and _is_answer(each) for each in found) or found[0] == found[1]:
        raise UnsupportedModel(
            f"{shown(path)}: false_token_id and true_token_id: expected two different token ids, found "
            f"{shown(found)}"
        )
    return RankerHead(kind="tokens", n_results=2, token_ids=tuple(cast("list[int]", found)))
