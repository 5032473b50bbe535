"""The gateway: output on the event loop, every way a request can end, and the server's phases."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.errors import EngineError, QueueFull, RequestCancelled, RequestTimedOut
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.request_pool import Delivery
from orca_jax.service.orca import Orca
from server.errors import NotReady, UnknownModel
from server.gateway import gateway as gateway_module
from server.gateway.gateway import Gateway, LiveRequest, Phase
from server.gateway.served_model import ServedModel
from tests.endpoint.harness import until_here
from tests.host.engines import (
    CONFIG,
    LETTERS,
    MODEL,
    SOON,
    GatedEngine,
    PacedEngine,
    at_rest,
    orca,
    simulated,
    writing,
)
from tests.host.fragile_engine import LOST, FragileEngine

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def served(service: Orca) -> ServedModel:
    return ServedModel(name="test", service=service, config=MODEL, serving=CONFIG, tokenizer=LETTERS)


def run(
    service: Orca, test: Callable[[Gateway], Awaitable[None]], *, request_timeout: float | None = None
) -> None:
    """Run `test` on a new event loop, with a gateway that is open to `service`."""

    async def main() -> None:
        gateway = Gateway(request_timeout=request_timeout)
        gateway.open(served(service))
        watch = asyncio.create_task(gateway.watch())
        try:
            async with asyncio.timeout(SOON):
                await test(gateway)
        finally:
            watch.cancel()

    with service:
        asyncio.run(main())


async def text_of(live: LiveRequest) -> str:
    return "".join([piece.text async for piece in live])


@pytest.fixture
def gated() -> Iterator[GatedEngine]:
    engine = GatedEngine()
    yield engine
    engine.let(1000)


def test_pieces_arrive_in_order_and_the_last_has_the_finish_reason() -> None:
    async def test(gateway: Gateway) -> None:
        params = SamplingParams(max_tokens=6)
        with gateway.submit([1], params, request_id="one") as live:
            pieces = [piece async for piece in live]
            assert "".join(piece.text for piece in pieces) == "In the"
            assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1].finish_reason is FinishReason.LENGTH
            assert gateway.n_live == 1
        assert gateway.n_live == 0

    run(orca(simulated(writing("In the beginning")), tokenizer=LETTERS), test)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12))
def test_requests_that_leave_early_do_not_affect_the_others(requests: list[tuple[int, int]]) -> None:
    """Requests of several lengths; some clients leave after their first or second piece."""

    async def test(gateway: Gateway) -> None:
        async def read_some(index: int, n_tokens: int, leaves_after: int) -> int:
            params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
            n_got = n_pieces = 0
            with gateway.submit([7], params, request_id=str(index)) as live:
                async for piece in live:
                    n_got += len(piece.token_ids)
                    n_pieces += 1
                    if n_pieces == leaves_after:
                        break
            return n_tokens if leaves_after == n_pieces else n_got

        got = await asyncio.gather(*[read_some(i, n, leaves) for i, (n, leaves) in enumerate(requests)])
        assert got == [n for n, _ in requests]
        await until_here(lambda: at_rest(service))
        assert gateway.n_live == 0

    service = orca(PacedEngine(seconds=0.0002))
    run(service, test)


def test_one_call_into_the_loop_per_iteration(gated: GatedEngine) -> None:
    crossings: list[int] = []

    async def test(gateway: Gateway) -> None:
        on_delivered = service.on_delivered
        assert on_delivered is not None

        def counted(deliveries: Sequence[Delivery]) -> None:
            crossings.append(len(deliveries))
            on_delivered(deliveries)

        service.on_delivered = counted
        # All four are in the pool before the first iteration returns, so all later iterations run all four.
        lives = [gateway.submit([i], SamplingParams(max_tokens=5), request_id=str(i)) for i in range(4)]
        gated.let(100)
        for live in lives:
            with live:
                await text_of(live)

    service = orca(gated)
    run(service, test)
    assert sum(crossings) == 4 * 5
    assert len(crossings) <= 6 and max(crossings) == 4


def test_a_deadline_ends_the_request_in_the_engine_too() -> None:
    async def test(gateway: Gateway) -> None:
        with gateway.submit([1], LONG, request_id="one", timeout=0.05) as live:
            with pytest.raises(RequestTimedOut, match=r"after 0\.05 seconds"):
                await text_of(live)
            assert live.finish_reason is FinishReason.TIMEOUT
        await until_here(lambda: at_rest(service))

    service = orca(PacedEngine(seconds=0.1))
    run(service, test)
    (record,) = service.timeline.requests
    assert record.finish_reason is FinishReason.TIMEOUT


def test_the_shorter_of_two_deadlines_counts() -> None:
    async def test(gateway: Gateway) -> None:
        with (
            gateway.submit([1], LONG, request_id="one", timeout=50) as live,
            pytest.raises(RequestTimedOut, match=r"after 0\.04 seconds"),
        ):
            await text_of(live)

    run(orca(PacedEngine(seconds=0.1)), test, request_timeout=0.04)


def test_a_hanging_device_does_not_keep_clients_waiting(
    gated: GatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "_GRACE_SECONDS", 0.05)

    async def test(gateway: Gateway) -> None:
        with gateway.submit([1], LONG, request_id="one", timeout=0.02) as live:
            with pytest.raises(RequestTimedOut):
                await text_of(live)
            assert live.finish_reason is None, "the engine has not answered"
        gated.let(1000)
        await until_here(lambda: at_rest(service))

    service = orca(gated)
    run(service, test)


def test_a_client_that_leaves_frees_its_slots_by_the_next_iteration(gated: GatedEngine) -> None:
    async def test(gateway: Gateway) -> None:
        with gateway.submit([1], LONG, request_id="one") as live:
            gated.let(1)
            assert (await anext(live)).token_ids
            await until_here(lambda: len(service.timeline.iterations) == 2)
        assert not at_rest(service), "it is in its second iteration"
        gated.let(1)
        await until_here(lambda: at_rest(service))
        assert len(service.timeline.iterations) == 2

    service = orca(gated)
    run(service, test)


def test_cancel_by_request_id(gated: GatedEngine) -> None:
    async def test(gateway: Gateway) -> None:
        with gateway.submit([1], LONG, request_id="one") as live:
            gated.let(1)
            await anext(live)
            assert gateway.cancel("one")
            assert not gateway.cancel("two")
            gated.let(1)
            with pytest.raises(RequestCancelled, match="was cancelled"):
                await text_of(live)
            assert not gateway.cancel("one"), "it has ended"

    run(orca(gated), test)


def test_a_full_queue_rejects_a_request_and_forgets_it(gated: GatedEngine) -> None:
    async def test(gateway: Gateway) -> None:
        lives = [gateway.submit([1], LONG, request_id="first")]
        await until_here(lambda: service.pool.n_running == 1)
        lives += [gateway.submit([1], LONG, request_id=str(i)) for i in range(2)]
        with pytest.raises(QueueFull):
            gateway.submit([1], LONG, request_id="one too many")
        assert gateway.n_live == 3
        for live in lives:
            live.__exit__()
        gated.let(10)
        await until_here(lambda: at_rest(service))

    service = orca(gated, config=replace(CONFIG, max_queue=2))
    run(service, test)


def test_a_failed_engine_ends_all_requests_with_its_reason(gated: GatedEngine) -> None:
    async def test(gateway: Gateway) -> None:
        with (
            gateway.submit([1], LONG, request_id="one") as first,
            gateway.submit([2], LONG, request_id="two") as second,
        ):
            gated.let(1)
            assert (await anext(first)).token_ids == (1,)
            gated.error = EngineError("the device is on fire")
            gated.let(5)
            for live in (first, second):
                with pytest.raises(EngineError, match="the device is on fire"):
                    await text_of(live)
        assert gateway.phase is Phase.FAILED
        with pytest.raises(EngineError, match="on fire"):
            gateway.model()
        with pytest.raises(EngineError, match="on fire"):
            gateway.submit([1], LONG, request_id="three")

    run(orca(gated), test)


def test_a_scheduler_that_dies_silently_is_noticed(gated: GatedEngine) -> None:
    async def test(gateway: Gateway) -> None:
        with gateway.submit([1], LONG, request_id="one") as live:
            await until_here(gated.waited_for.is_set)

            def broken(*_: object) -> None:
                raise KeyError("delivery")

            service.on_delivered = None
            service.scheduler.timeline.delivered = broken  # pyright: ignore[reportAttributeAccessIssue]
            gated.let(5)
            with pytest.raises(EngineError, match="delivery"):
                await text_of(live)

    service = orca(gated)
    run(service, test)


def test_during_recovery_requests_are_accepted_and_wait() -> None:
    async def test(gateway: Gateway) -> None:
        await until_here(engine.is_down.is_set)
        reason = "stage 2: its process died; its requests run again when the workers are up"
        assert gateway.status == (Phase.RECOVERING, reason)
        assert gateway.model("test").name == "test"
        with gateway.submit([97], SamplingParams(max_tokens=3), request_id="one") as live:
            assert service.pool.n_waiting == 1
            engine.recoveries.append(True)
            await until_here(lambda: gateway.phase is Phase.READY)
            assert gateway.status == (Phase.READY, None)
            engine.let(100)
            assert await text_of(live) == "abc"

    engine = FragileEngine()
    engine.known_lost = LOST
    service = orca(engine, tokenizer=LETTERS)
    run(service, test)


def test_a_drain_during_recovery_ends_waiting_requests_in_time() -> None:
    async def test(gateway: Gateway) -> None:
        await until_here(engine.is_down.is_set)

        async def cancelled_text() -> str:
            with gateway.submit([1], LONG, request_id="one") as live:
                with pytest.raises(RequestCancelled) as ended:
                    await text_of(live)
                return str(ended.value)

        request = asyncio.create_task(cancelled_text())
        await until_here(lambda: gateway.n_live == 1)
        assert await gateway.drain(0.05) == 1
        assert gateway.phase is Phase.DRAINING
        assert "shutting down" in await request

    engine = FragileEngine()
    engine.known_lost = LOST
    run(orca(engine), test)


def test_a_loss_after_the_loop_is_closed_is_not_logged_but_recovered_from() -> None:
    engine = FragileEngine()
    service = orca(engine)

    async def main() -> None:
        Gateway().open(served(service))

    asyncio.run(main())
    engine.known_lost = LOST
    with service:
        assert engine.is_down.wait(SOON)
        engine.recoveries.append(True)
        engine.let(10)
        assert service.submit([1], SamplingParams(max_tokens=2)).result(SOON).token_ids == [1, 2]
    assert (service.recovery.losses, service.recovery.recoveries) == (1, 1)
    assert service.failure is None


@pytest.mark.parametrize("n", [1, 5])
def test_a_drain_waits_for_live_requests(n: int, gated: GatedEngine) -> None:
    async def test(gateway: Gateway) -> None:
        async def finish_reason_of(name: str) -> FinishReason | None:
            with gateway.submit([1], SamplingParams(max_tokens=20), request_id=name) as live:
                await text_of(live)
                return live.finish_reason

        requests = [asyncio.create_task(finish_reason_of(str(i))) for i in range(n)]
        await until_here(lambda: gateway.n_live == n)
        drain = asyncio.create_task(gateway.drain(SOON))
        await asyncio.sleep(0)
        assert gateway.phase is Phase.DRAINING
        with pytest.raises(NotReady, match="shutting down"):
            gateway.submit([1], LONG, request_id="late")
        gated.let(1000)
        assert await drain == 0
        assert await asyncio.gather(*requests) == [FinishReason.LENGTH] * n

    run(orca(gated), test)


def test_a_drain_cancels_requests_that_take_too_long() -> None:
    async def test(gateway: Gateway) -> None:
        async def cancelled_text(name: str) -> str:
            with gateway.submit([1], LONG, request_id=name) as live:
                with pytest.raises(RequestCancelled) as ended:
                    await text_of(live)
                return str(ended.value)

        requests = [asyncio.create_task(cancelled_text(str(i))) for i in range(3)]
        await until_here(lambda: gateway.n_live == 3)
        start = time.monotonic()
        assert await gateway.drain(0.05) == 3
        assert time.monotonic() - start < 5
        assert all("shutting down" in message for message in await asyncio.gather(*requests))

    run(orca(PacedEngine(seconds=0.05)), test)


def test_requests_before_the_model_is_loaded_and_for_another_model() -> None:
    async def test() -> None:
        gateway = Gateway()
        assert gateway.phase is Phase.LOADING and gateway.served is None
        with pytest.raises(NotReady, match="loading"):
            gateway.model()
        with orca(simulated()) as service:
            gateway.open(served(service))
            assert gateway.phase is Phase.READY
            assert gateway.model("test") is gateway.model()
            with pytest.raises(UnknownModel, match="'gpt-4' here; 'test' is served"):
                gateway.model("gpt-4")

    asyncio.run(test())
