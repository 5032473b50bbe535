"""The service on engines without a device: delivery, ends of every kind, and failures that wake everybody."""

import gc
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.errors import (
    EmptyPrompt,
    EngineError,
    InvalidRequest,
    InvalidSchedulingParameter,
    NotSupported,
    PromptTooLong,
    QueueFull,
    RequestTooLarge,
    ServiceClosed,
    TokenOutOfRange,
)
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling import prefix_lookup
from orca_jax.scheduling.admission import weight_in_bytes
from orca_jax.scheduling.request_pool import Delivery
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.service.generation import Generation
from orca_jax.service.output import Piece
from orca_jax.service.scores import score_request
from tests.host.engines import (
    CONFIG,
    EOS,
    LETTERS,
    MODEL,
    SOON,
    GatedEngine,
    at_rest,
    orca,
    simulated,
    writing,
)

CACHING = replace(CONFIG, scheduling=SchedulingConfig())


def rest(generation: Generation) -> Iterator[Piece]:
    while (piece := generation.next_piece(SOON)) is not None:
        yield piece


@pytest.fixture
def engine() -> Iterator[GatedEngine]:
    engine = GatedEngine()
    yield engine
    engine.let(1000)  # whatever the test did, the thread ends


# Delivery


@pytest.mark.parametrize("n_workers", [1, 3])
def test_every_token_is_delivered_in_order_with_the_reason_at_the_end(n_workers: int) -> None:
    with orca(simulated(n_workers=n_workers)) as service:
        generations = [service.submit([10 * i], SamplingParams(max_tokens=5 + i)) for i in range(9)]
        for i, generation in enumerate(generations):
            pieces = list(generation)
            assert [t for piece in pieces for t in piece.token_ids] == list(range(10 * i, 10 * i + 5 + i))
            assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1].finish_reason == FinishReason.LENGTH == generation.finish_reason
            assert generation.next_piece(0) is None
    assert at_rest(service)


def test_the_result_is_whole_whether_pieces_were_taken_or_not() -> None:
    with orca(simulated(writing("In the beginning")), tokenizer=LETTERS) as service:
        params = SamplingParams(max_tokens=6, seed=5)
        one = service.submit([7, 8], params, request_id="mine")
        two = service.submit([7, 8], params)
        assert "".join(piece.text for piece in one) == "In the"
        for result in (one.result(SOON), two.result(SOON)):
            assert (result.text, result.n_input, result.seed) == ("In the", 2, 5)
            assert result.token_ids == [ord(c) for c in "In the"]
            assert result.finish_reason == FinishReason.LENGTH
            assert result.logprobs is None
        assert one.result(SOON).request_id == one.request_id == "mine"
        assert two.request_id != one.request_id


def test_the_result_says_how_much_of_the_prompt_was_cached() -> None:
    with orca(simulated(), config=CACHING) as service:
        params = SamplingParams(max_tokens=3)
        salted, other = SchedulingParams(cache_salt="s"), SchedulingParams(cache_salt="t")
        prompt = [7] * 20  # two full blocks of 8
        asked = (SchedulingParams(), SchedulingParams(), salted, other, salted)
        results = [service.submit(prompt, params, scheduling=each).result(SOON) for each in asked]
        assert [result.n_cached for result in results] == [0, 16, 0, 0, 16]
        assert {result.n_input for result in results} == {20}
        rules = service.rules(params)
        checked = [service.check(prompt, rules, tenant=tenant) for tenant in ("a", "b", "a")]
        assert [service.submit(each, rules).result(SOON).n_cached for each in checked] == [0, 0, 16]
    with orca(simulated()) as service:
        assert [service.submit(prompt, params).result(SOON).n_cached for _ in range(2)] == [0, 0]


def test_a_prompt_is_hashed_before_it_enters_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    chain = prefix_lookup.chain_hashes

    def watched(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        threads.append(threading.current_thread())
        return chain(root, token_ids, block_size)

    def weighed(request: Request, index: int) -> int:
        n_hashes = len(request.prompt_ids) // 8
        assert request.weight == weight_in_bytes(request.prompt_ids, request.sampling, n_hashes)
        return index

    monkeypatch.setattr(prefix_lookup, "chain_hashes", watched)
    with orca(simulated(weighed), config=CACHING) as service:
        service.submit([7] * 20, SamplingParams(max_tokens=20)).result(SOON)
        assert threads == [threading.current_thread()]
        rules = service.rules(SamplingParams(max_tokens=20))
        checked = service.check([8] * 20, rules)
        outputs = [service.submit(checked, rules).result(SOON) for _ in range(3)]
        assert threads == [threading.current_thread()] * 2, "once for all outputs of a prompt"
        assert [output.n_cached for output in outputs] == [0, 16, 16]


def test_a_priority_needs_the_scheduling_policy() -> None:
    first = SchedulingParams(priority=-1)
    with orca(simulated(), config=CACHING) as service:
        with pytest.raises(InvalidSchedulingParameter) as caught:
            service.submit([7], SamplingParams(), scheduling=first)
        assert caught.value.param == "priority"
        assert len(service.pool) == 0
    by_priority = replace(CONFIG, scheduling=SchedulingConfig(scheduling_policy="priority"))
    with orca(simulated(), config=by_priority) as service:
        assert service.submit([7], SamplingParams(max_tokens=2), scheduling=first).result(SOON).n_input == 1


def test_without_a_tokenizer_there_are_tokens_alone() -> None:
    with orca(simulated()) as service:
        generation = service.submit([1], SamplingParams(max_tokens=2))
        assert [piece.text for piece in generation] in ([""], ["", ""])
        assert generation.result(SOON).text == ""


def test_a_slow_consumer_gets_one_larger_piece(engine: GatedEngine) -> None:
    with orca(engine) as service:
        generation = service.submit([1], SamplingParams(max_tokens=50))
        engine.let(50)
        generation.result(SOON)
        (piece,) = generation
        assert piece.token_ids == tuple(range(1, 51))
        assert piece.finish_reason == FinishReason.LENGTH


def test_a_wait_that_takes_too_long_can_be_taken_up_again(engine: GatedEngine) -> None:
    with orca(engine) as service:
        generation = service.submit([1], SamplingParams(max_tokens=1))
        with pytest.raises(TimeoutError):
            generation.next_piece(0.01)
        with pytest.raises(TimeoutError):
            generation.result(0.01)
        engine.let(1)
        assert generation.next_piece(SOON) == Piece((1,), "", FinishReason.LENGTH)


def test_a_hundred_threads_each_get_their_own_tokens() -> None:
    def use(i: int) -> list[int]:
        params = SamplingParams(max_tokens=1 + i % 20, ignore_eos=True)
        generation = service.submit([i], params)
        return [t for piece in rest(generation) for t in piece.token_ids]

    with orca(simulated()) as service, ThreadPoolExecutor(100) as threads:
        for i, got in enumerate(threads.map(use, range(200), timeout=SOON)):
            assert got == [(i + k) % MODEL.vocab_size for k in range(1 + i % 20)]
    assert at_rest(service)
    assert len(service.timeline.requests) == 200


# Where it ends


def test_an_end_token_ends_the_text_and_is_not_in_it() -> None:
    with orca(simulated(lambda _, i: [65, 66, EOS, 67][i])) as service:
        result = service.submit([1], SamplingParams(max_tokens=4)).result(SOON)
        assert (result.token_ids, result.finish_reason) == ([65, 66, EOS], FinishReason.STOP)
        ignoring = service.submit([1], SamplingParams(max_tokens=4, ignore_eos=True)).result(SOON)
        assert (ignoring.token_ids[-1], ignoring.finish_reason) == (67, FinishReason.LENGTH)


def test_a_stop_string_ends_the_text_before_it() -> None:
    with orca(simulated(writing("one two three ")), tokenizer=LETTERS) as service:
        params = SamplingParams(max_tokens=40, stop=("two", "x"))
        generation = service.submit([1], params)
        pieces = list(rest(generation))
        assert "".join(piece.text for piece in pieces) == "one " == generation.result().text
        assert pieces[-1].finish_reason == FinishReason.STOP
        assert len(generation.result().token_ids) == len("one two")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    with orca(simulated(writing("one tw")), tokenizer=LETTERS) as service:
        params = SamplingParams(max_tokens=6, stop=("two",))
        generation = service.submit([1], params)
        assert "".join(piece.text for piece in rest(generation)) == "one tw"


def test_max_tokens_counts_output() -> None:
    with orca(simulated()) as service:
        longest = service.submit([1] * 60, SamplingParams(max_tokens=4)).result(SOON)
        assert len(longest.token_ids) == 4
        with pytest.raises(RequestTooLarge, match="ask for at most 4") as caught:
            service.submit([1] * 60, SamplingParams(max_tokens=5))
        assert caught.value.param == "max_tokens"


# Seeds


def test_a_request_without_a_seed_gets_and_reports_one() -> None:
    with orca(simulated()) as service:
        seeds = {service.submit([1], SamplingParams()).seed for _ in range(20)}
        assert len(seeds) == 20
        assert all(0 <= seed < 1 << 53 for seed in seeds), "exact as a double"
        assert service.submit([1], SamplingParams(seed=-7)).seed == -7


def test_the_services_seed_gives_the_same_seeds_again() -> None:
    def seeds(seed: int) -> list[int]:
        with orca(simulated(), seed=seed) as service:
            return [service.submit([1], SamplingParams()).seed for _ in range(5)]

    assert seeds(1) == seeds(1) != seeds(2)


# What is refused


IMAGE, IMAGE_ID = "<image>", MODEL.vocab_size


def with_image() -> Tokenizer:
    """The tokenizer of letters with a token that the model has no embedding of."""
    library = tokenizers.Tokenizer(models.BPE({f"{i:03}": i for i in range(IMAGE_ID)}, []))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([AddedToken(IMAGE, special=True)])
    library.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(library)
    assert tokenizer.encode(IMAGE) == [IMAGE_ID]
    return tokenizer


def test_a_token_without_an_embedding_is_refused_by_its_name() -> None:
    tokenizer = with_image()
    with orca(simulated(), tokenizer=tokenizer) as service:
        rules = service.rules(SamplingParams(max_tokens=2))
        with pytest.raises(
            TokenOutOfRange, match=r"token id 300 \('<image>', which the model has no embedding"
        ):
            service.check([1, *tokenizer.encode(IMAGE), 2], rules)
        with pytest.raises(TokenOutOfRange, match=r"token id 300 \('<image>'"):
            score_request(service, [1, 2, IMAGE_ID])
        for nobody in (301, -1, 1 << 70):
            with pytest.raises(TokenOutOfRange, match=rf"token id {nobody} is not in the vocabulary"):
                service.check([1, nobody], rules)
        # As a bad word it is never generated: no mask of the model's tokens has a bit for it.
        assert service.rules(SamplingParams(bad_words=(IMAGE,))).constraint() is None


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], SamplingParams(), EmptyPrompt),
        ([1] * 64, SamplingParams(), PromptTooLong),
        ([300], SamplingParams(), TokenOutOfRange),
        ([-1], SamplingParams(), TokenOutOfRange),
        ([1 << 70], SamplingParams(), TokenOutOfRange),
        ([1], SamplingParams(max_tokens=64), RequestTooLarge),
        ([1], SamplingParams(stop=("x",)), NotSupported),
    ],
)
def test_a_bad_request_is_refused_and_disturbs_nothing(
    prompt: list[int], params: SamplingParams, error: type[InvalidRequest]
) -> None:
    with orca(simulated()) as service:
        with pytest.raises(error):
            service.check(prompt, service.rules(params))
        with pytest.raises(error):
            service.submit(prompt, params)
        assert at_rest(service)
        assert service.submit([1], SamplingParams(max_tokens=2)).result(SOON).token_ids == [1, 2]


def test_a_full_queue_refuses(engine: GatedEngine) -> None:
    config = ServingConfig(max_batch_size=1, n_slots=64, max_batch_tokens=64, block_size=8, max_queue=2)
    with orca(engine, config=config) as service:
        held: list[Generation] = []

        def fill() -> None:
            while True:
                held.append(service.submit([1], SamplingParams(max_tokens=50)))

        with pytest.raises(QueueFull):
            fill()
        assert 2 <= len(held) <= 3
        engine.let(1)  # for `close`: what runs ends with its iteration


def test_before_the_start_nothing_is_taken() -> None:
    service = orca(simulated())
    with pytest.raises(ServiceClosed, match="not been started"):
        service.submit([1], SamplingParams())
    service.close()


# Leaving early


def test_a_cancelled_request_ends_with_what_it_has(engine: GatedEngine) -> None:
    with orca(engine) as service:
        running, waiting = (
            [service.submit([i], SamplingParams(max_tokens=60)) for i in range(4)],
            service.submit([4], SamplingParams(max_tokens=60)),
        )
        engine.let(2)
        assert running[0].next_piece(SOON) is not None
        waiting.cancel()
        waiting.cancel()
        for generation in running:
            generation.close()
        engine.let(1)
        for generation in (*running, waiting):
            *_, last = rest(generation)
            assert last.finish_reason == FinishReason.CANCELLED == generation.result(SOON).finish_reason
        assert waiting.result().token_ids == []
        engine.let(1)
        assert service.submit([9], SamplingParams(max_tokens=1)).result(SOON).token_ids == [9]
        assert at_rest(service)


def test_with_closes_and_a_finished_one_keeps_its_reason() -> None:
    with orca(simulated()) as service:
        with service.submit([1], SamplingParams(max_tokens=1)) as generation:
            generation.result(SOON)
        assert generation.finish_reason == FinishReason.LENGTH


def test_a_dropped_generation_frees_its_slots(engine: GatedEngine) -> None:
    config = ServingConfig(max_batch_size=1, n_slots=64, max_batch_tokens=64, block_size=8)
    with orca(engine, config=config) as service:
        dropped = service.submit([1], SamplingParams(max_tokens=60))
        after = service.submit([2], SamplingParams(max_tokens=3))
        del dropped
        gc.collect()
        engine.let(4 + 2)  # 60 would be needed if the first ran on
        assert after.result(SOON).token_ids == [2, 3, 4]
        assert at_rest(service)


# Closing and failing


def test_close_cancels_what_is_live_and_refuses_what_comes(engine: GatedEngine) -> None:
    service = orca(engine)
    service.start()
    generations = [service.submit([i], SamplingParams(max_tokens=50)) for i in range(9)]
    engine.let(3)
    service.close(SOON)
    service.close(SOON)
    assert {generation.result().finish_reason for generation in generations} == {FinishReason.CANCELLED}
    assert at_rest(service)
    with pytest.raises(ServiceClosed):
        service.submit([1], SamplingParams())


def test_close_does_not_wait_forever(engine: GatedEngine) -> None:
    service = orca(engine)
    service.start()
    generation = service.submit([1], SamplingParams())
    assert engine.waited_for.wait(SOON)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(generation.result)
        with pytest.raises(EngineError, match=r"did not stop within 0\.05 seconds"):
            service.close(0.05)
        with pytest.raises(EngineError, match="did not stop"):
            waiting.result(SOON)
    assert generation.finish_reason == FinishReason.ERROR
    engine.let(1)
    service.close(SOON)


@pytest.mark.parametrize("error", [EngineError("the device is gone"), RuntimeError("the device is gone")])
def test_a_failure_of_the_engine_wakes_everybody(engine: GatedEngine, error: Exception) -> None:
    cause = ValueError("the first cause")
    error.__cause__ = cause
    with orca(engine) as service, ThreadPoolExecutor(10) as threads:
        generations = [service.submit([i], SamplingParams(max_tokens=50)) for i in range(9)]
        waiting = [threads.submit(generation.result) for generation in generations]
        engine.let(1)
        assert generations[0].next_piece(SOON) == Piece((0,), "", None)
        engine.error = error
        engine.let(1)
        for future, generation in zip(waiting, generations, strict=True):
            with pytest.raises(EngineError, match="the device is gone") as caught:
                future.result(SOON)
            raised: BaseException | None = caught.value
            while raised is not None and raised is not cause:
                raised = raised.__cause__
            assert raised is cause, "the cause is kept"
            assert generation.finish_reason == FinishReason.ERROR
        last = generations[0].next_piece(SOON)
        assert last is not None
        assert last.finish_reason == FinishReason.ERROR
        with pytest.raises(EngineError, match="the device is gone"):
            generations[0].next_piece(SOON)
        with pytest.raises(EngineError, match=r"accepts no more requests: .*the device is gone"):
            service.submit([1], SamplingParams())
        assert at_rest(service)


@pytest.mark.parametrize("at", ["issue", "wait"])
def test_the_simulated_engine_fails_at_either_end(at: str) -> None:
    engine = simulated()
    engine.fail("issue" if at == "issue" else "wait")
    with orca(engine) as service:
        with pytest.raises(EngineError, match=f"failed in {at}"):
            service.submit([1], SamplingParams()).result(SOON)
        assert at_rest(service)


def test_even_a_failure_that_cannot_be_dealt_with_wakes_everybody(
    engine: GatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_again(_: Scheduler) -> None:
        raise AssertionError("and again")

    with orca(engine) as service:
        monkeypatch.setattr("orca_jax.service.orca.fail_all", fail_again)
        generation = service.submit([1], SamplingParams())
        engine.error = RuntimeError("first")
        engine.let(1)
        with pytest.raises(EngineError, match="RuntimeError: first"):
            generation.result(SOON)
        assert generation.finish_reason == FinishReason.ERROR
        assert service.failure is not None
        assert "and again" in service.failure.__notes__[0]


class Panic(BaseException):
    """A panic as pyo3 raises it, which is not an Exception."""


def test_a_panic_on_the_scheduler_s_thread_ends_every_request(engine: GatedEngine) -> None:
    with orca(engine) as service:
        generations = [service.submit([i], SamplingParams(max_tokens=50)) for i in range(9)]
        engine.error = Panic("overflow")  # pyright: ignore[reportAttributeAccessIssue]
        engine.let(1)
        for generation in generations:
            with pytest.raises(EngineError, match="Panic: overflow"):
                generation.result(SOON)
            assert generation.finish_reason == FinishReason.ERROR
        assert str(service.failure) == "Panic: overflow"
        with pytest.raises(EngineError, match="accepts no more requests: Panic: overflow"):
            service.submit([1], SamplingParams())
        assert at_rest(service)


def test_a_thread_that_ended_without_a_word_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    service = orca(simulated())
    monkeypatch.setattr(service.thread, "run", lambda: None)
    service.start()
    service.thread.join(SOON)
    assert str(service.failure) == "the scheduler's thread ended unexpectedly"
    with pytest.raises(EngineError, match="the scheduler's thread ended unexpectedly"):
        service.submit([1], SamplingParams()).result(SOON)


def test_an_orderly_end_is_not_a_failure() -> None:
    service = orca(simulated())
    assert service.failure is None
    with service:
        service.submit([1], SamplingParams()).result(SOON)
    assert service.failure is None


def test_an_id_is_used_again_as_soon_as_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool releases an id before the end of its request is delivered."""
    with orca(simulated()) as service:
        generations: list[Generation] = []
        delivered = service.timeline.delivered

        def submit() -> None:
            n = len(generations)
            generations.append(
                service.submit([n], SamplingParams(max_tokens=1 + n % 3, ignore_eos=True), request_id="A")
            )

        def submit_first(deliveries: Sequence[Delivery]) -> None:
            if len(generations) < 100 and any(reason for _, _, reason in deliveries):
                submit()
            delivered(deliveries)

        monkeypatch.setattr(service.timeline, "delivered", submit_first)
        submit()
        for n in range(100):
            assert generations[n].result(SOON).token_ids == list(range(n, n + 1 + n % 3))
        assert service.failure is None


def test_an_old_generation_does_not_cancel_its_successor(engine: GatedEngine) -> None:
    with orca(engine) as service:
        old = service.submit([1], SamplingParams(max_tokens=1), request_id="A")
        engine.let(1)
        assert old.result(SOON).token_ids == [1]
        new = service.submit([5], SamplingParams(max_tokens=2), request_id="A")
        old._output.finish_reason = None  # as when its end is still on its way to its user
        old.cancel()
        del old
        gc.collect()
        engine.let(2)
        assert new.result(SOON).token_ids == [5, 6]
