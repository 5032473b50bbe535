"""Real weights, served as they are: directories that scripts/make_real_models.py makes. Skipped without them.

ORCA_REAL_MODELS names the directory of those directories; `make test-real` makes it.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from orca_jax import LLM, SamplingParams
from orca_jax.errors import TokenOutOfRange

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
    rows = rows_of(name)
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    with LLM(_as_published(name, tmp_path), max_batch_size=4, n_slots=1024, max_batch_tokens=256) as llm:
        assert llm.tokenizer is not None
        assert [llm.tokenizer.encode(row["prompt"]) for row in rows] == [row["prompt_ids"] for row in rows]
        results = llm.generate([row["prompt"] for row in rows], params)
        if name == "gemma3-270m":
            with pytest.raises(TokenOutOfRange, match=f"'{IMAGE}', which the model has no embedding"):
                llm.generate([f"a picture: {IMAGE}"], params)
    for row, result in zip(rows, results, strict=True):
        close = next((i for i, gap in enumerate(row["gaps"]) if gap < _MARGIN), len(row["gaps"]))
        assert list(result.token_ids)[:close] == row["token_ids"][:close], row["prompt"]
    assert sum(all(gap >= _MARGIN for gap in row["gaps"]) for row in rows) >= len(rows) * 2 // 3


IMAGE = "<image_soft_token>"


def _as_published(name: str, tmp_path: Path) -> Path:
    """The directory; for Gemma 3 with the token of its published tokenizer that GGUF files leave out.

    It is the first that the text model has no embedding of.
    """
    source = Path(_PLACE) / name
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
