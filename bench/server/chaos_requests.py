"""The requests of `bench.server.chaos`: sent over HTTP or gRPC, and compared with what each gives alone."""

import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
import numpy as np

from bench.server.http_client import Exchange, events_of, post
from bench.server.soak_clients import WORDS
from bench.server.sure_choices import sure_choices
from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.checkpoint.safetensors_reader import StoredTensor, read_header
from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.families.model_config import ModelConfig
from orca_jax.model.reference import Parameters
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub

COMPLETIONS = "/v1/completions"
LOGPROB_ERROR = 1e-3  # far above what float32 loses
_STOPS = ("the", " a", ".", "\n", "and ", "e of")
_BEGINNINGS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and",
    "It was a dark night, and nobody spoke",
)
_MAX_WORDS = 90
_REFERENCE_POSITIONS = 512
_CHANGE = 0.1  # deviation of each weight's relative change

Door = Literal["HTTP", "HTTP stream", "gRPC"]
DOORS: tuple[Door, ...] = ("HTTP", "HTTP stream", "gRPC")


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """A request whose output follows from the weights: greedy without a `seed`, else at temperature 1."""

    text: str
    max_tokens: int
    seed: int | None
    stop: tuple[str, ...]
    logprobs: int | None

    @property
    def sampling(self) -> SamplingParams:
        """The parameters for an engine in this process."""
        return SamplingParams(**self._parameters)

    @property
    def _parameters(self) -> dict[str, Any]:
        """The sampling parameters, which an engine and gRPC know by the same names."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if self.seed is None else 1.0,
            "seed": self.seed,
            "stop": self.stop,
            "logprobs": self.logprobs,
            "ignore_eos": True,
        }

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The body for /v1/completions."""
        body = self._parameters | {"prompt": self.text, "return_token_ids": True, "stream": stream}
        return {name: value for name, value in body.items() if value is not None}

    def message(self) -> pb.GenerateRequest:
        """The same for gRPC."""
        return pb.GenerateRequest(text=self.text, sampling=pb.SamplingParams(**self._parameters))


def drawn_requests(n: int, longest: int, rng: random.Random) -> list[ChaosRequest]:
    """`n` different requests with outputs of up to `longest` tokens; some begin alike."""
    requests = list[ChaosRequest]()
    for i in range(n):
        words = " ".join(rng.choices(WORDS, k=rng.randrange(1, 1 + rng.choice((6, 30, _MAX_WORDS)))))
        beginning = rng.choice(_BEGINNINGS) + " " if rng.random() < 0.4 else ""
        requests.append(
            ChaosRequest(
                text=f"{beginning}{words}",
                max_tokens=rng.randrange(1, longest + 1),
                seed=rng.getrandbits(62) if i % 4 == 1 else None,
                stop=tuple(rng.sample(_STOPS, rng.randrange(1, 3))) if i % 4 == 2 else (),
                logprobs=rng.randrange(4) if i % 3 == 0 else None,
            )
        )
    return requests


@dataclass(slots=True)
class Answer:
    """An answer's parts as they arrive; `version` is that of the weights that gave the last token."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    version: int = 0
    reason: str | None = None


class Refused(Exception):
    """A request ended with an error; `code` is HTTP's code, or the name of the gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Sender:
    """Sends requests to a server's HTTP `address` and gRPC `channel`."""

    def __init__(self, address: tuple[str, int], channel: grpc.aio.Channel) -> None:
        self._address = address
        self._generation = GenerationStub(channel)

    async def send(self, request: ChaosRequest, door: Door, *, leave_after: float | None = None) -> Answer:
        """Send a request and return its whole answer.

        `leave_after` seconds the client disconnects, and the answer is what came until then. Raises Refused;
        OSError, EOFError or ValueError if the connection broke or the answer is incomplete.
        """
        answer = Answer()
        with nullcontext() if leave_after is None else suppress(TimeoutError):
            async with asyncio.timeout(leave_after):
                if door == "gRPC":
                    await self._over_grpc(request, answer)
                else:
                    await self._over_http(request, answer, stream=door == "HTTP stream")
        if leave_after is None and answer.reason is None:
            raise ValueError(f"the answer has no finish reason: {answer}")
        return answer

    async def _over_http(self, request: ChaosRequest, answer: Answer, *, stream: bool) -> None:
        content = post(*self._address, COMPLETIONS, request.body(stream=stream))
        async with Exchange(*self._address, content) as exchange:
            await exchange.head()
            body = await exchange.body()
        if exchange.status != 200:
            raise _refused(json.loads(body))
        events = events_of(body) if stream else [body.decode(), "[DONE]"]
        for data in events:
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise _refused(event)
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.token_ids += choice.get("token_ids") or ()
                answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
                answer.version = choice.get("weights_version") or answer.version
                answer.reason = choice["finish_reason"] or answer.reason
        raise ValueError(f"a stream ended with neither [DONE] nor an error: {events[-1:]}")

    async def _over_grpc(self, request: ChaosRequest, answer: Answer) -> None:
        call = self._generation.Generate(request.message())
        try:
            async for response in call:
                answer.text += response.text
                answer.token_ids += response.token_ids
                answer.logprobs += (token.logprob for token in response.logprobs)
                if response.finish_reason:
                    answer.version = response.weights_version
                    answer.reason = pb.FinishReason.Name(response.finish_reason)
        except grpc.aio.AioRpcError as error:
            raise Refused(error.code().name, error.details() or "") from error


def _refused(body: dict[str, Any]) -> Refused:
    error = body["error"]
    return Refused(str(error["code"]), error["message"])


Verdict = Literal["equal", "near tie", "mixed", "mixed, not judged"]


class Weights:
    """A checkpoint, and what each request alone gives with it, in an engine in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._alone: dict[ChaosRequest, Answer] = {}
        self._n_sure: dict[ChaosRequest, int] = {}

    def engine(self) -> LLM:
        """An engine in this process that runs one request at a time, without cached prefixes."""
        return LLM(
            self.directory,
            dtype="float32",
            max_batch_size=1,
            n_slots=2 * _REFERENCE_POSITIONS,
            prefix_caching=False,
            compile_ahead=False,
        )

    def run_alone(self, requests: Iterable[ChaosRequest]) -> dict[ChaosRequest, tuple[int, ...]]:
        """Run each request while nothing else runs; return the prompts' token ids."""
        prompts: dict[ChaosRequest, tuple[int, ...]] = {}
        with self.engine() as llm:
            assert llm.tokenizer is not None
            for request in requests:
                prompts[request] = tuple(llm.tokenizer.encode(request.text))
                result = llm.generate(request.text, request.sampling)[0]
                logprobs = [token.logprob for token in result.logprobs or ()]
                self._alone[request] = Answer(result.text, result.token_ids, logprobs)
        return prompts

    def alone(self, request: ChaosRequest) -> Answer:
        """The output of the request when it runs alone."""
        return self._alone[request]

    def n_sure(self, request: ChaosRequest, prompt: Sequence[int]) -> int:
        """The number of tokens of its output alone that rounding cannot change; see sure_choices."""
        if request not in self._n_sure:
            output = self._alone[request].token_ids
            self._n_sure[request] = sure_choices(*self._reference, prompt, output, request.sampling).n
        return self._n_sure[request]

    @cached_property
    def _reference(self) -> tuple[ModelConfig, Parameters]:
        checkpoint = load_checkpoint(self.directory, dtype="float32")
        n = min(_REFERENCE_POSITIONS, checkpoint.config.n_positions)
        return replace(checkpoint.config, n_positions=n), checkpoint.parameters


class Continued(NamedTuple):
    """A greedy continuation, and by how much the best logit exceeds the second at each token."""

    token_ids: list[int]
    gaps: list[float]


def greedy(llm: LLM, prompt: tuple[int, ...], n: int) -> Continued:
    """Continue token ids by `n` tokens."""
    result = llm.generate(prompt, SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, logprobs=2))[0]
    gaps = [token.top[0][1] - token.top[1][1] for token in result.logprobs or ()]
    return Continued(result.token_ids, gaps)


def difference(request: ChaosRequest, expected: Answer, answer: Answer) -> str | None:
    """The difference between an answer and the expected one; None if they agree.

    Over HTTP the tokens of a stop text have no log-probabilities.
    """
    if answer.token_ids != expected.token_ids:
        return f"tokens {answer.token_ids} instead of {expected.token_ids}"
    if answer.text != expected.text:
        return f"text {answer.text!r} instead of {expected.text!r}"
    pairs = zip(expected.logprobs, answer.logprobs, strict=False)
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    missing = len(expected.logprobs) - len(answer.logprobs)
    if worst > LOGPROB_ERROR or missing < 0 or (missing > 0 and not request.stop):
        return f"log-probabilities {answer.logprobs} instead of {expected.logprobs}"
    return None


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of first tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def write_changed(source: Path, target: Path, *, seed: int) -> None:
    """Write a checkpoint of the same model, each of whose weights differs by some hundredths of its value."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    rng = np.random.default_rng(seed)
    (file,) = source.glob("*.safetensors")
    tensors = [
        Tensor(stored.name, stored.shape, stored.element, lambda stored=stored: _changed(stored, rng))
        for stored in read_header(file).values()
    ]
    write_files(target, tensors, 1 << 40)


def _changed(stored: StoredTensor, rng: np.random.Generator) -> np.ndarray:
    values = np.fromfile(
        stored.file, stored.element, count=stored.n_bytes // stored.element.itemsize, offset=stored.offset
    ).reshape(stored.shape)
    noise = 1 + _CHANGE * rng.standard_normal(stored.shape, np.float32)
    return (values.astype(np.float32) * noise).astype(stored.element)
