"""A SentencePiece tokenizer over HTTP: text follows the prompt, and tokens have their places in it."""

from collections.abc import Iterator

import httpx2
import pytest

from orca_jax.request.request import Request
from orca_jax.request.tokenizer import Tokenizer
from tests.endpoint.harness import CONFIG, serving_model
from tests.endpoint.http_client import connected
from tests.gpt_config import gpt_config
from tests.host.engines import orca, simulated
from tests.host.request.family_tokenizers import FAMILIES

LIBRARY = FAMILIES["llama 1 and 2"]()
TOKENIZER = Tokenizer(LIBRARY)
MODEL = gpt_config(
    vocab_size=LIBRARY.get_vocab_size(),
    n_positions=512,
    hidden_size=8,
    n_layers=1,
    n_heads=1,
    ffn_size=8,
    eos_token_ids=(2,),
)
TEXT = " the earth 👩 and é!"
OUTPUT = [*TOKENIZER.encode_inside(TEXT), 2]


def token(request: Request, index: int) -> int:
    return OUTPUT[min(index, len(OUTPUT) - 1)]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with (
        orca(simulated(token), config=CONFIG, model=MODEL, tokenizer=TOKENIZER) as service,
        serving_model(service, MODEL, CONFIG, tokenizer=TOKENIZER) as server,
        connected(server) as client,
    ):
        yield client


def completion(client: httpx2.Client, prompt: str | list[int], **fields: object) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": 40, "logprobs": 0, **fields}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    return choice


def test_the_text_follows_the_prompt(client: httpx2.Client) -> None:
    choice = completion(client, "In the beginning God created")
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    # After special tokens alone it begins the text, and SentencePiece drops the space before it.
    assert completion(client, [1])["text"] == TEXT[1:]


def test_a_stop_string_cuts_the_text(client: httpx2.Client) -> None:
    assert completion(client, "God", stop=["👩 and"])["text"] == " the earth "


@pytest.mark.parametrize("prompt", ["God", [1]])
def test_places_of_tokens(client: httpx2.Client, prompt: str | list[int]) -> None:
    choice = completion(client, prompt)
    text, logprobs = str(choice["text"]), choice["logprobs"]
    assert isinstance(logprobs, dict)
    names, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert len(names) == len(OUTPUT) - 1
    for name, offset in zip(names, offsets, strict=True):
        shown = name if not name.startswith("bytes:") else text[offset]
        assert text.startswith(shown, offset) or (offset == 0 and text.startswith(shown[1:]))
        assert not name.startswith("bytes:") or text[offset] in "👩é"


def test_an_echoed_prompt(client: httpx2.Client) -> None:
    choice = completion(client, "God and é", echo=True)
    assert choice["text"] == "God and é" + TEXT
    logprobs = choice["logprobs"]
    assert isinstance(logprobs, dict)
    text = str(choice["text"])
    for name, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[2:]:
        assert name.startswith("bytes:") or text.startswith(name, offset), (name, offset)
