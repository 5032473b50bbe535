"""Real weights, from the directories of scripts/make_real_models.py. Skipped without them.

ORCA_REAL_MODELS is the folder that has these directories; `make test-real` makes it.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import find_parameters, load_checkpoint
from orca_jax.checkpoint.shard_reader import Box, Parts, Source
from orca_jax.errors import TokenOutOfRange
from orca_jax.execution import matmul_backend
from orca_jax.families.packed_form import PackedForm
from orca_jax.families.parameters import parameter_table, stage_bytes
from orca_jax.request.chat.template_files import load_chat_template

_PLACE = os.environ.get("ORCA_REAL_MODELS", "")
# Two logits closer than this may change places by rounding.
_MARGIN = 1e-3

pytestmark = pytest.mark.skipif(not _PLACE, reason="ORCA_REAL_MODELS is not set; `make test-real` makes them")


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((Path(_PLACE) / name / "greedy.json").read_text())["prompts"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """From text: tokenizer, weights and configuration as the directory has them, in batches."""
    with _loaded(_as_published(name, tmp_path)) as llm:
        assert _assert_same_tokens(llm, rows_of(name)) >= 600
        if name == "gemma3-270m":
            with pytest.raises(TokenOutOfRange, match=f"'{IMAGE}', which the model has no embedding"):
                llm.generate([f"a picture: {IMAGE}"], SamplingParams(max_tokens=1))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_a_gguf_file_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizer, template, weights and configuration of the file, whose weights stay packed.

    The products are those of unpacked numbers, because the products in C round activations.
    """
    monkeypatch.setattr(matmul_backend, "has_packed_form", lambda x, form, n_out: False)
    path = Path(_PLACE) / name / "model.gguf"
    facts = json.loads((path.parent / "greedy.json").read_text())
    with _loaded(path) as llm:
        assert llm.tokenizer is not None
        assert _assert_same_tokens(llm, facts["prompts"]) >= 600
        for row in facts["texts"]:
            assert llm.tokenizer.encode(row["text"]) == row["ids"], row["text"]
        forms = llm.config.weight_forms.values()
        assert {form.name for form in forms if isinstance(form, PackedForm)} >= {"Q8_0"}
    templates = load_chat_template(path, None)
    if facts["chat"] is None:
        assert templates is None
    else:
        assert templates is not None
        assert templates.choose(None, has_tools=False).render(facts["conversation"]) == facts["chat"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_a_gguf_file_as_it_is_served(name: str) -> None:
    """Even with rounded activations, tokens are transformers' wherever the choice is clear."""
    with _loaded(Path(_PLACE) / name / "model.gguf") as llm:
        assert _assert_same_tokens(llm, rows_of(name), margin=0.5) >= 50


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_weights_in_memory_are_hardly_more_than_the_file(name: str) -> None:
    """With shared embeddings and dense vectors; and `orca plan` counts the same bytes."""
    path = Path(_PLACE) / name / "model.gguf"
    given = load_checkpoint(path, dtype=np.float32)
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(given.parameters))
    assert 0.9 * path.stat().st_size < n_bytes < 1.1 * path.stat().st_size
    assert n_bytes == stage_bytes(given.config, range(given.config.n_layers), 1, 4)


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_unpacked_numbers_are_those_of_the_gguf_package(name: str) -> None:
    """To the bit: transformers unpacked the file with that package."""
    model, found = find_parameters(Path(_PLACE) / name / "model.gguf", forms={})
    _, expected = find_parameters(Path(_PLACE) / name)
    for each, parameter in parameter_table(model).items():
        whole = tuple((0, n) for n in parameter.shape)
        mine, right = (_read(sources[each], parameter.shape, whole) for sources in (found, expected))
        np.testing.assert_array_equal(mine, right, err_msg=each)


def _read(source: Source, shape: tuple[int, ...], box: Box) -> np.ndarray:
    assert isinstance(source, Parts)
    return source.read(shape, np.dtype(np.float32), box)


def _loaded(model: Path) -> LLM:
    return LLM(model, max_batch_size=4, n_slots=8192, max_batch_tokens=512, dtype="float32")


def _assert_same_tokens(llm: LLM, rows: list[dict[str, Any]], margin: float = _MARGIN) -> int:
    """Compare each row's tokens before its first choice within `margin`; return how many were compared."""
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    assert llm.tokenizer is not None
    assert [llm.tokenizer.encode(row["prompt"]) for row in rows] == [row["prompt_ids"] for row in rows]
    results = llm.generate([row["prompt"] for row in rows], params)
    n_compared = 0
    for row, result in zip(rows, results, strict=True):
        close = next((i for i, gap in enumerate(row["gaps"]) if gap < margin), len(row["gaps"]))
        assert list(result.token_ids)[:close] == row["token_ids"][:close], row["prompt"]
        n_compared += close
    return n_compared


IMAGE = "<image_soft_token>"


def _as_published(name: str, tmp_path: Path) -> Path:
    """The directory; for Gemma 3 with the token of its published tokenizer that GGUF files leave out.

    It is the first token without an embedding in the text model.
    """
    source = (Path(_PLACE) / name).resolve()
    if name != "gemma3-270m":
        return source
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([IMAGE])
    assert tokenizer.token_to_id(IMAGE) == 262144
    (tmp_path / "tokenizer.json").unlink()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path
