"""Requests through a line have the output, errors and ends of those in the engine's process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.errors import (
    EngineError,
    InvalidRequest,
    OutputFailed,
    QueueFull,
)
from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.output import Piece
from server.endpoint_processes.messages import AdapterFacts, Status
from server.gateway.gateway import Gateway, LiveRequest, Phase, Submission, submitted
from server.gateway.served_model import ServedModel
from tests.endpoint.endpoint_processes.linked import linked
from tests.endpoint.harness import until_here
from tests.host.engines import CONFIG, LETTERS, MODEL, GatedEngine, at_rest, orca, simulated, writing
from tests.host.scheduling.test_leases import Packed, leases_of

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@asynccontextmanager
async def running(
    gateway: Gateway, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str = "a"
) -> AsyncIterator[list[LiveRequest]]:
    service = gateway.model().service
    rules = service.rules(params)
    submissions = [
        Submission(service.check(prompt, rules), choice, f"{name}{i}.{j}")
        for i, prompt in enumerate(prompts)
        for j, choice in enumerate(rules.choices())
    ]
    async with submitted(gateway, submissions, owner="me") as requests:
        yield requests


async def outcomes(
    gateway: Gateway, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[dict[str, Any]]:
    """All that an endpoint can read of each request, once all have ended."""
    found = list[dict[str, Any]]()
    async with running(gateway, prompts, params) as requests:
        for request in requests:
            pieces, failure = list[Piece](), None
            try:
                async for piece in request:
                    pieces.append(piece)
            except OutputFailed as error:
                failure = type(error), str(error)
            found.append(
                {
                    "tokens": [token for piece in pieces for token in piece.token_ids],
                    "text": "".join(piece.text for piece in pieces),
                    "reason": request.finish_reason,
                    "failure": failure,
                    "logprobs": [one for piece in pieces for one in piece.logprobs],
                    "score": pieces[-1].score,
                    "version": pieces[-1].weights_version,
                    "stop": request.stop_string,
                    "prompt": request.prompt_logprobs,
                    "outputs": request.pieces(),
                    "n_input": request.n_input,
                    "so_far": request.so_far(),
                    "seed": request.seed if params.seed is not None else None,
                }
            )
    return found


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    seed=st.sampled_from((None, 5)),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from((None, 0, 3)),
    prompt_logprobs=st.sampled_from((None, 2)),
    stop=st.sampled_from(((), ("c",), ("de", "cd"), ("\ufffd",))),
    n=st.sampled_from((1, 2)),
    min_tokens=st.sampled_from((0, 1)),
)
PROMPTS = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=30), min_size=1, max_size=4)


def compare(prompts: Sequence[Sequence[int]], params: SamplingParams, text: str) -> None:
    """Check that the outputs of two equal engines are equal, one of them behind a line."""
    data = text.encode()

    async def main() -> None:
        gateway = Gateway()
        gateway.open(ServedModel(name="test", service=here, config=MODEL, serving=CONFIG, tokenizer=LETTERS))
        expected = await outcomes(gateway, prompts, params)
        async with linked(there) as link:
            assert await outcomes(link.gateway, prompts, params) == expected

    def token(_: Request, index: int) -> int:
        return data[index % len(data)]

    with (
        orca(simulated(token), seed=3, tokenizer=LETTERS) as here,
        orca(simulated(token), seed=3, tokenizer=LETTERS) as there,
    ):
        asyncio.run(main())
        assert at_rest(there)


@settings(deadline=None, max_examples=40)
@given(prompts=PROMPTS, params=PARAMS, text=st.sampled_from(("abcdefgh", "ab\u00e9\u4e2d", "aacdaade")))
def test_answers_are_those_of_one_process(
    prompts: list[list[int]], params: SamplingParams, text: str
) -> None:
    compare(prompts, params, text)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=6, use_beam_search=True, n=2, temperature=0.0),
        SamplingParams(max_tokens=6, guided_regex="a[bc]+d"),
        SamplingParams(max_tokens=6, guided_regex="[xyz]+"),
        SamplingParams(max_tokens=8, bad_words=("b",)),
        SamplingParams(max_tokens=8, allowed_token_ids=(97, 98)),
    ],
    ids=["beams", "regex", "another regex", "bad words", "allowed tokens"],
)
def test_rare_kinds(params: SamplingParams) -> None:
    compare([[97, 98, 99]], params, "abcd")


def test_refusals_reach_the_client_before_any_output() -> None:
    engine = GatedEngine(writing("a"))
    small = replace(CONFIG, max_batch_size=1, max_queue=1)

    async def main() -> None:
        async with linked(service) as link, running(link.gateway, [[1]], LONG, "first"):
            await until_here(lambda: service.pool.n_running == 1)
            async with running(link.gateway, [[1]], LONG, "second"):
                with pytest.raises(QueueFull, match="the queue is full: 1 requests are waiting"):
                    async with running(link.gateway, [[1]], LONG, "third"):
                        pytest.fail("it was accepted")
            with pytest.raises(InvalidRequest) as caught:
                link.remote.check([MODEL.vocab_size], link.remote.rules(LONG))
            assert caught.value.param == "prompt", "refused without the engine's process"

    with orca(engine, config=small) as service:
        asyncio.run(ended(main, engine))


async def ended(main: Any, engine: GatedEngine) -> None:
    """Run `main` while the engine goes on, so that requests can end."""
    running = asyncio.create_task(main())
    while not running.done():
        engine.let(1)
        await asyncio.sleep(0.001)
    await running


@pytest.mark.parametrize("params", [LONG, SamplingParams(max_tokens=4, guided_regex="[ab]+")])
def test_a_fault_of_one_request_is_its_own(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("inside")

    async def main() -> None:
        async with linked(service) as link:
            with monkeypatch.context() as patched:
                patched.setattr(service, "new_request", fail)
                with pytest.raises(EngineError, match="the request failed in an unexpected way"):
                    await outcomes(link.gateway, [[1]], params)
            assert len((await outcomes(link.gateway, [[1]], LONG))[0]["tokens"]) == 40

    with orca(simulated(writing("ab")), tokenizer=LETTERS) as service:
        asyncio.run(main())
    assert "KeyError: 'inside'" in caplog.text


def test_ids_in_use_by_others_are_no_matter() -> None:
    async def main() -> None:
        async with linked(service) as link:
            service.submit([5], LONG, request_id="a0.0")
            assert len((await outcomes(link.gateway, [[7]], LONG))[0]["tokens"]) == 40

    with orca(simulated(writing("ab"))) as service:
        asyncio.run(main())


def test_a_client_that_leaves_frees_its_slots() -> None:
    engine = GatedEngine(writing("ab"))

    async def main() -> None:
        async with linked(service) as link:
            async with running(link.gateway, [[1], [2]], LONG) as requests:
                await anext(aiter(requests[0]))
            await until_here(lambda: at_rest(service))
            reasons = {record.finish_reason for record in service.timeline.requests}
            assert reasons == {FinishReason.CANCELLED}

    with orca(engine) as service:
        asyncio.run(ended(main, engine))


def test_a_dropped_handle_frees_its_slots() -> None:
    engine = GatedEngine(writing("ab"))

    async def main() -> None:
        async with linked(service) as link:
            rules = link.remote.rules(LONG)
            live = link.gateway.submit(link.remote.check([1], rules), rules, request_id="x")
            await until_here(lambda: service.pool.n_running == 1)
            link.gateway.forget(live)
            del live
            await until_here(lambda: at_rest(service))

    with orca(engine) as service:
        asyncio.run(ended(main, engine))


def test_params_of_a_transfer_come_while_the_prompt_is_computed() -> None:
    engine = GatedEngine(writing("ab"))

    async def main() -> None:
        async with linked(service) as link:
            rules = link.remote.rules(SamplingParams(max_tokens=1))
            wish = SchedulingParams(kv_transfer=KVTransferParams(do_remote_decode=True, offer_early=True))
            checked = service.check(range(20), rules, wish)
            async with submitted(link.gateway, [Submission(checked, rules, "x")], owner="me") as requests:
                lease = await requests[0].offered()
                assert lease is not None and len(lease.remote_block_ids) == 2
                assert requests[0].finish_reason is None
                engine.let(1)
                assert [piece.finish_reason async for piece in requests[0]] == [FinishReason.LENGTH]
                assert requests[0].kv_lease == lease

    with orca(engine) as service:
        kv = service.scheduler.kv
        kv.leases = leases_of(kv, Packed)
        asyncio.run(main())


def test_the_end_of_the_line_ends_the_requests_at_both_ends() -> None:
    engine = GatedEngine(writing("ab"))

    async def main() -> None:
        async with linked(service) as link:
            async with running(link.gateway, [[1]], LONG) as requests:
                await anext(aiter(requests[0]))
                await asyncio.to_thread(link.line.close)
                await until_here(lambda: at_rest(service))
                link.remote.lose(EngineError("the engine's process has ended"))
                with pytest.raises(EngineError, match="the engine's process has ended"):
                    async for _ in requests[0]:
                        pass
            assert link.gateway.phase is Phase.FAILED

    with orca(engine) as service:
        asyncio.run(ended(main, engine))


def test_a_failure_of_the_engine_ends_requests_with_its_reason() -> None:
    engine = GatedEngine(writing("ab"))

    async def main() -> None:
        async with linked(service) as link, running(link.gateway, [[1]], LONG) as requests:
            await anext(aiter(requests[0]))
            engine.error = EngineError("the device is gone")
            with pytest.raises(EngineError, match="the device is gone"):
                async for _ in requests[0]:
                    pass

    with orca(engine) as service:
        asyncio.run(ended(main, engine))


def test_the_status_is_followed() -> None:
    async def main() -> None:
        async with linked(service) as link:
            remote, gateway = link.remote, link.gateway
            assert gateway.phase is Phase.READY
            remote.follow(Status(number=4, is_asleep=True))
            assert gateway.phase is Phase.ASLEEP
            remote.follow(Status(number=5, trouble="stage 1 is lost", expected_wait=7.0))
            assert gateway.phase is Phase.RECOVERING and remote.expected_wait == 7.0
            remote.follow(Status(number=6, is_paused=True, adapters=(AdapterFacts("blue", 3, "c0", "d"),)))
            assert gateway.phase is Phase.PAUSED
            assert gateway.model("blue").adapter == "blue"
            checked = remote.check([1], remote.rules(LONG), SchedulingParams(adapter="blue"))
            assert checked.cache_salt[2:] == ("adapter c0",)
            remote.follow(Status(number=7, failure="gone"))
            assert gateway.phase is Phase.FAILED
            await until_here(lambda: link.seen == [4, 5, 6, 7])

    with orca(simulated(writing("ab"))) as service:
        asyncio.run(main())
