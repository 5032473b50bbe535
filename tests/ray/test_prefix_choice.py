"""The choice of an engine for a request: the one with its prefix unless too busy, else a fair share."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.ray.routing.prefix_choice import Ongoing, PrefixChoice

ENGINES = ["a", "b", "c"]
IDLE = dict.fromkeys(ENGINES, 0.0)
PRESSURES = st.dictionaries(st.sampled_from("abcde"), st.floats(0, 4), min_size=1)
CHAIN = st.lists(st.integers(0, 40), max_size=12, unique=True)


@given(st.lists(st.tuples(CHAIN, st.sampled_from("abcdefg"))), CHAIN, PRESSURES)
def test_every_engine_is_in_the_order_once(
    history: list[tuple[list[int], str]], chain: list[int], pressures: dict[str, float]
) -> None:
    choice = PrefixChoice()
    for known, name in history:
        choice.sent(known, name)
    order = choice.order(chain, pressures)
    assert sorted(order) == sorted(pressures)
    # One that is fuller than the emptiest by more than the tolerance never comes before it.
    emptiest = min(pressures.values())
    fuller = [name for name in pressures if pressures[name] > emptiest + 0.5 + 1e-5]
    assert all(pressures[order[0]] <= emptiest + 0.5 + 1e-5 for _ in fuller)


@given(CHAIN.filter(bool), st.sampled_from(ENGINES), st.data())
def test_a_conversation_stays_within_the_tolerance(chain: list[int], home: str, data: st.DataObject) -> None:
    choice = PrefixChoice(tolerance=0.5)
    choice.sent(chain, home)
    pressure = data.draw(st.floats(0, 1))
    order = choice.order(chain, {**IDLE, home: pressure})
    if abs(pressure - 0.5) > 1e-5:
        assert (order[0] == home) == (pressure < 0.5)


def test_a_short_common_beginning_does_not_gather_all_at_one_engine() -> None:
    choice = PrefixChoice(tolerance=0.5)
    counts = Counter[str]()
    for i in range(30):  # one step of ten in common
        chain = [1, *range(100 * (i + 1), 100 * (i + 1) + 9)]
        name = choice.order(chain, {name: counts[name] / 32 for name in ENGINES})[0]
        choice.sent(chain, name)
        counts[name] += 1
    assert max(counts.values()) - min(counts.values()) <= 2


def test_the_longest_match_wins_and_a_part_counts_as_a_part() -> None:
    choice = PrefixChoice(tolerance=0.5)
    choice.sent([1, 2, 3, 4], "a")
    choice.sent([1, 2], "b")
    assert choice.order([1, 2, 3, 4], IDLE)[:2] == ["a", "b"]
    # b has half of the prompt less than a: a quarter of a batch.
    assert choice.order([1, 2, 3, 4], {**IDLE, "a": 0.24})[0] == "a"
    assert choice.order([1, 2, 3, 4], {**IDLE, "a": 0.26})[0] == "b"
    # A gap ends the match: c was sent step 4, but not those before it.
    choice.sent([9, 4], "c")
    assert choice.order([1, 2, 3, 4], {"a": 4, "b": 0, "c": 0}) == ["b", "c", "a"]


def test_an_adapter_stays_on_an_engine_that_is_not_much_fuller() -> None:
    choice, sql, support = PrefixChoice(adapter_tolerance=0.25), 1 << 50, 1 << 51
    choice.sent([1, 2], "a", sql)
    assert choice.order([7], {**IDLE, "a": 0.24}, sql)[0] == "a"
    assert choice.order([7], {**IDLE, "a": 0.26}, sql)[0] != "a"
    assert choice.order([7], {**IDLE, "a": 0.01}, support)[0] != "a"
    assert choice.order([7], {**IDLE, "a": 0.01})[0] != "a"
    # Of an adapter that no engine has, all prompts go to one engine, which every router chooses.
    first = {choice.order([n], IDLE, support)[0] for n in range(10, 30)}
    assert first == {PrefixChoice().order([], IDLE, support)[0]}


@given(st.lists(CHAIN, max_size=60))
def test_the_memory_is_bounded_and_keeps_the_latest(chains: list[list[int]]) -> None:
    choice = PrefixChoice(most_steps=16)
    for chain in chains:
        choice.sent(chain, "b")
        assert len(choice) <= 16
        assert not chain or choice.order(chain, {"a": 0.0, "b": 0.4, "c": 0.0})[0] == "b"


def test_the_end_of_a_chain_is_forgotten_first() -> None:
    choice = PrefixChoice(most_steps=4)
    choice.sent([1, 2, 3], "a")
    choice.sent([7, 8], "b")  # 3 is forgotten
    assert len(choice) == 4
    assert choice.order([1, 2, 3], {"a": 0.3, "b": 0.0})[0] == "a"  # it still has two thirds


def test_requests_without_a_prompt_take_turns() -> None:
    choice = PrefixChoice()
    counts = Counter[str]()
    for _ in range(30):
        name = choice.order([], IDLE)[0]
        choice.sent([], name)
        counts[name] += 1
    assert counts == {"a": 10, "b": 10, "c": 10}


def test_new_conversations_spread_and_routers_agree_on_them() -> None:
    one, other = PrefixChoice(), PrefixChoice()
    chosen = [one.order([n], IDLE)[0] for n in range(300)]
    assert chosen == [other.order([n], dict(reversed(IDLE.items())))[0] for n in range(300)]
    assert min(Counter(chosen)[name] for name in ENGINES) > 70
    # An engine that goes takes nobody else's conversations along.
    left = [one.order([n], {"a": 0, "b": 0})[0] for n in range(300)]
    assert all(now == before for now, before in zip(left, chosen, strict=True) if before != "c")


def test_a_removed_engine_is_not_chosen_and_a_new_one_gets_work() -> None:
    choice = PrefixChoice()
    for i in range(20):
        choice.sent([1, i + 2], "a")
    choice.keep({"b", "c"})
    assert choice.order([1, 2], {"b": 0, "c": 0})[0] in "bc"
    choice.sent([], "b")
    choice.sent([], "c")
    assert choice.order([], {"b": 0, "c": 0, "new": 0})[0] == "new"


@given(st.lists(st.tuples(st.sampled_from(["chose", "arrived", "ended"]), st.integers(0, 5)), max_size=40))
def test_ongoing_counts_each_request_once_and_nothing_after_its_end(steps: list[tuple[str, int]]) -> None:
    ongoing = Ongoing()
    alive = dict[int, str]()
    for n, (step, request) in enumerate(steps):
        engine = ENGINES[n % 3]
        if step == "chose":
            ongoing.chose(str(request), engine, now=0.0)
            alive[request] = engine
        elif step == "arrived":
            ongoing.arrived(str(request), engine)
        else:
            ongoing.ended(str(request))
            alive.pop(request, None)
        assert sum(map(ongoing.count, ENGINES)) == len(alive)
    for request in range(6):
        ongoing.ended(str(request))
    assert not any(map(ongoing.count, ENGINES))


def test_a_request_that_was_never_sent_is_forgotten() -> None:
    ongoing = Ongoing()
    ongoing.chose("given up", "a", now=0.0)
    ongoing.chose("sent", "a", now=0.0)
    ongoing.arrived("sent", "b")
    assert (ongoing.count("a"), ongoing.count("b")) == (1, 1)
    ongoing.chose("later", "c", now=6.0)
    assert [ongoing.count(name) for name in ENGINES] == [0, 1, 1]
    ongoing.arrived("given up", "a")  # too late to be counted
    assert ongoing.count("a") == 0
