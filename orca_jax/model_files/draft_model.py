"""Drafters with weights: a smaller model with the same tokenizer (draft:MODEL), or a head (mtp, eagle3)."""

from dataclasses import replace
from pathlib import Path

from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, DifferentTokenizer, NotACheckpoint
from orca_jax.errors import shown as quoted
from orca_jax.families.eagle3 import eagle3_head
from orca_jax.families.hf_config import HFConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.next_token import next_token_head, next_token_model
from orca_jax.families.presets import PRESETS
from orca_jax.families.strict_json import shown
from orca_jax.families.trainers.array_trees import has_array_tree
from orca_jax.gguf_file import is_gguf
from orca_jax.model_files.found_model import FoundModel, find_config, find_model, is_function
from orca_jax.model_files.locate import find_directory
from orca_jax.model_files.weight_files import tensor_names

_ADVICE = "a draft model must have the tokenizer of the served model, as smaller models of its family have"


def find_draft_model(found: FoundModel, config: EngineConfig) -> FoundModel | None:
    """Find the model that drafts for `found`; None if none does. Its weights are not read yet.

    With the `load_format` dummy it may be a preset too. Raises DifferentTokenizer, another ConfigError or a
    CheckpointError.
    """
    if config.eagle3_head is not None:
        return _eagle3_head(found, config.eagle3_head, config)
    if config.draft_head:
        return _next_token_head(found)
    name = _name(config)
    if name is None:
        return None
    draft = find_model(name, "dummy" if config.load_format == "dummy" else "auto")
    check_same_tokens(found, draft)
    return draft


def find_draft_config(config: EngineConfig) -> ModelConfig | None:
    """The config of the model that drafts, without its weights and tokenizer; None if none does."""
    if config.eagle3_head is not None:
        served = find_config(config.model, config.load_format)
        return eagle3_reader(_eagle3_directory(config.eagle3_head, weights=False), served).model
    if config.draft_head:
        return _next_token_config(config)
    name = _name(config)
    return None if name is None else find_config(name, config.load_format)


def eagle3_reader(directory: Path, served: ModelConfig) -> HFConfig:
    """Read the EAGLE-3 head in a directory, which drafts for `served`. Raises as `eagle3_head`."""
    return eagle3_head(directory, served, tensor_names(directory))


def _eagle3_head(found: FoundModel, name: str, config: EngineConfig) -> FoundModel:
    if found.user_model is not None:
        raise ConfigError(
            f"speculative is {config.speculative!r}, and a model of your own keeps no states for a head; "
            "choose ngram or suffix"
        )
    random = config.load_format == "dummy"
    directory = _eagle3_directory(name, weights=not random)
    head = eagle3_reader(directory, found.config)
    if not random and tensor_names(directory) is None:
        raise _no_tensors(directory)
    return replace(found, name=config.speculative, config=head.model, directory=directory, note=head.note)


def _eagle3_directory(name: str, *, weights: bool) -> Path:
    directory = find_directory(name, weights=weights)
    if is_gguf(directory) or has_array_tree(directory):
        raise ConfigError(
            f"speculative is 'eagle3:{shown(name)}', which is no Hugging Face directory with safetensors; "
            "EAGLE-3 heads are read from such alone"
        )
    return directory


def _no_tensors(directory: Path) -> NotACheckpoint:
    """The error for a head without safetensors. The paper's authors publish pickles."""
    here = shown(directory)
    return NotACheckpoint(
        f"{here} has neither model.safetensors nor model.safetensors.index.json. A head that was published "
        "as pytorch_model.bin, a pickle, must be written as safetensors first: "
        'python -c "import torch, safetensors.torch as s; '
        f"t = torch.load('{here}/pytorch_model.bin', weights_only=True); "
        f"s.save_file({{n: t[n].contiguous() for n in t}}, '{here}/model.safetensors')\""
    )


def _next_token_head(found: FoundModel) -> FoundModel:
    """The head in the checkpoint of `found`; the dummy's is random, whatever the family publishes."""
    if found.user_model is not None:
        raise ConfigError("speculative is 'mtp', and a model of your own has no such head; choose ngram")
    if found.directory is None:
        return replace(found, name="mtp", config=next_token_model(found.config))
    return replace(found, name="mtp", config=_head_in(found.directory))


def _next_token_config(config: EngineConfig) -> ModelConfig:
    if config.load_format == "dummy" or str(config.model) in PRESETS:
        return next_token_model(find_config(config.model, config.load_format))
    return _head_in(find_directory(str(config.model), weights=False))


def _head_in(directory: Path) -> ModelConfig:
    if is_gguf(directory) or has_array_tree(directory):
        raise ConfigError(
            f"speculative is 'mtp', and {shown(directory)} is no Hugging Face directory with safetensors, "
            "the one place from which the layer that predicts further tokens is read; choose ngram or suffix"
        )
    return next_token_head(directory).model


def _name(config: EngineConfig) -> str | None:
    name = config.draft_model
    if name is not None and is_function(name):
        raise ConfigError(f"speculative is {config.speculative!r}: a model of your own cannot draft yet")
    return name


def check_same_tokens(found: FoundModel, draft: FoundModel) -> None:
    """Raise DifferentTokenizer unless each id that both models have means the same token.

    Without both tokenizers the sizes of the vocabularies are compared.
    """
    sizes = found.config.vocab_size, draft.config.vocab_size
    if found.tokenizer is None or draft.tokenizer is None:
        if sizes[0] != sizes[1]:
            raise DifferentTokenizer(
                f"the draft model {draft.name} has {sizes[1]} tokens, and {found.name} has {sizes[0]}; "
                f"{_ADVICE}"
            )
        return
    ours, theirs = found.tokenizer.names(), draft.tokenizer.names()
    both = [each for each in ours if each in theirs and each < min(sizes)]
    differing = [each for each in both if ours[each] != theirs[each]]
    if not differing and 2 * len(both) >= max(len(ours), len(theirs)):
        return
    first = ""
    if differing:
        each = min(differing)
        first = f"; token {each} is {quoted(ours[each])} here and {quoted(theirs[each])} there"
    raise DifferentTokenizer(
        f"the draft model {draft.name} has another tokenizer than {found.name}: of {len(ours)} tokens here "
        f"and {len(theirs)} there, {len(both) - len(differing)} are the same{first}; {_ADVICE}"
    )
