"""Traces for comparing policies: conversations of one or more turns, drawn from a seed.

A turn's prompt is the conversation so far, with the engine's own answers, and new tokens. A prefix cache
therefore finds as much as in a real conversation. A turn asks for up to `limit` tokens and gets
`n_output`: a stop token, which the scheduler cannot foresee, ends it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.simulate.workload import poisson
from server.load.trace import PAPER_INPUTS, PAPER_OUTPUTS, TracedRequest

VOCABULARY = 50_000
_PROMPTS = 2  # the third stream of a seed, after lengths and arrivals (bench/trace.py)
Range = tuple[int, int]  # both included


@dataclass(frozen=True, slots=True)
class Turn:
    """New tokens of a prompt, the output's real and its longest length, and seconds after an answer.

    That answer is of turn `after` of the conversation, whose prompt and answer come before the new tokens;
    None: of the turn before.
    """

    new_ids: tuple[int, ...]
    n_output: int
    limit: int
    think: float = 0.0
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """`arrival` is when its first turn arrives. Latencies are measured only if it `counts`."""

    arrival: float
    turns: tuple[Turn, ...]
    owner: str = ""
    counts: bool = True

    def before(self, turn: int) -> int | None:
        """The turn that this one continues; None for the first."""
        after = self.turns[turn].after
        return after if after is not None else turn - 1 if turn else None

    def following(self, turn: int) -> list[int]:
        """The turns that continue this one."""
        return [i for i in range(turn + 1, len(self.turns)) if self.before(i) == turn]


Trace = tuple[Conversation, ...]  # in order of arrival
MakeTrace = Callable[[float], Trace]  # from the rate, in conversations a second


def as_requests(trace: Trace, vocab_size: int) -> tuple[TracedRequest, ...]:
    """The turns of all conversations as the requests of a plain trace, with ids below `vocab_size`."""
    requests: list[TracedRequest] = []
    for conversation in trace:
        first = len(requests)
        for i, turn in enumerate(conversation.turns):
            ids = tuple(token_id % vocab_size for token_id in turn.new_ids)
            before = conversation.before(i)
            after = None if before is None else first + before
            arrival = conversation.arrival if before is None else turn.think
            requests.append(TracedRequest(ids, turn.n_output, arrival, after))
    return tuple(requests)


def from_requests(requests: Sequence[TracedRequest]) -> Trace:
    """A plain trace, such as a file's, as conversations; limits are the outputs' lengths."""
    place: list[tuple[int, int]] = []  # of each request: its conversation, and its turn there
    begun: list[tuple[TracedRequest, list[Turn]]] = []
    for request in requests:
        ids, n = request.prompt_ids, request.n_output
        if request.after is None:
            place.append((len(begun), 0))
            begun.append((request, [Turn(ids, n, n)]))
        else:
            number, before = place[request.after]
            turns = begun[number][1]
            place.append((number, len(turns)))
            turns.append(Turn(ids, n, n, request.arrival, before))
    return tuple(Conversation(first.arrival, tuple(turns), first.owner) for first, turns in begun)


def n_requests(trace: Trace) -> int:
    """The turns of all conversations."""
    return sum(len(conversation.turns) for conversation in trace)


def longest(trace: Trace) -> int:
    """The maximum length of a request: input tokens and limit."""
    return max(_most_tokens(conversation) for conversation in trace)


def single(
    n: int,
    rate: float,
    *,
    n_input: Range = PAPER_INPUTS,
    n_output: Range = PAPER_OUTPUTS,
    limit_factor: int = 1,
    seed: int = 0,
    owner: str = "",
) -> Trace:
    """`n` separate requests of uniform lengths; limits are `limit_factor` times the outputs."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(n_input[0], n_input[1] + 1, n).tolist()
    outputs = rng.integers(n_output[0], n_output[1] + 1, n).tolist()
    arrivals = poisson(n, rate, seed).tolist()
    ids = _random_ids(seed)
    return tuple(
        Conversation(arrival, (Turn(ids(inputs[i]), outputs[i], limit_factor * outputs[i]),), owner)
        for i, arrival in enumerate(arrivals)
    )


def conversations(
    n: int,
    rate: float,
    *,
    n_turns: int = 8,
    n_system: int = 200,
    n_question: Range,
    n_output: Range,
    think: float,
    seed: int = 0,
) -> Trace:
    """`n` conversations, `rate` a second, which all begin with the same system prompt.

    `think` is the mean of the exponential time from an answer to the next question, in seconds.
    """
    rng = np.random.default_rng(seed)
    ids = _random_ids(seed)
    system = ids(n_system)
    trace: list[Conversation] = []
    for arrival in poisson(n, rate, seed).tolist():
        turns: list[Turn] = []
        for i in range(n_turns):
            question = ids(int(rng.integers(n_question[0], n_question[1] + 1)))
            length = int(rng.integers(n_output[0], n_output[1] + 1))
            wait = float(rng.exponential(think)) if i else 0.0
            turns.append(Turn(question if i else system + question, length, length, wait))
        trace.append(Conversation(arrival, tuple(turns)))
    return tuple(trace)


def with_long_prompts(trace: Trace, *, every: float, n_input: int, n_output: int, seed: int = 0) -> Trace:
    """The trace with a long prompt every `every` seconds; these do not count."""
    ids = _random_ids(seed + 1)
    n = int(trace[-1].arrival / every)
    long = [
        Conversation((i + 0.5) * every, (Turn(ids(n_input), n_output, n_output),), counts=False)
        for i in range(n)
    ]
    return _merged(trace, tuple(long))


def with_flood(trace: Trace, flood: Trace) -> Trace:
    """The trace with another tenant's requests, which do not count."""
    return _merged(trace, tuple(replace(conversation, counts=False) for conversation in flood))


def _merged(*traces: Trace) -> Trace:
    return tuple(sorted((one for trace in traces for one in trace), key=lambda one: one.arrival))


def _most_tokens(conversation: Conversation) -> int:
    ends: list[int] = []  # tokens of each turn with its answer
    most = 0
    for i, turn in enumerate(conversation.turns):
        before = conversation.before(i)
        n = len(turn.new_ids) + (0 if before is None else ends[before])
        most = max(most, n + turn.limit)
        ends.append(n + turn.n_output)
    return most


def _random_ids(seed: int) -> Callable[[int], tuple[int, ...]]:
    rng = np.random.default_rng([seed, _PROMPTS])
    return lambda n: tuple(rng.integers(0, VOCABULARY, n).tolist())
