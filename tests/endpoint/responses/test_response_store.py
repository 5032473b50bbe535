"""The store of responses: never over its bounds, and fair between its owners."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import UnknownResponse
from server.http.responses.store import ResponseStore, StoredResponse

MAX_BYTES = 40_000


def entry(number: int, owner: str, size: int = 100) -> StoredResponse:
    return StoredResponse(
        response_id=f"resp_{number}",
        tenant=owner,
        owner=owner,
        response=b"x" * size,
        items=b"[]",
        n_input=0,
    )


def store(n: int = 10, seconds: float = 60.0, clock: list[float] | None = None) -> ResponseStore:
    times = clock or [0.0]
    return ResponseStore(max_responses=n, max_bytes=MAX_BYTES, seconds=seconds, now=lambda: times[0])


def has(kept: ResponseStore, one: StoredResponse) -> bool:
    try:
        return kept.get(one.response_id, one.tenant, param="id") is one
    except UnknownResponse:
        return False


OWNERS = "abcd"
STEPS = st.lists(
    st.tuples(
        st.sampled_from(OWNERS),
        st.sampled_from([0, 500, 3_000, 8_500, 12_000]),
        st.sampled_from(["put", "put", "put", "delete", "wait"]),
    ),
    min_size=12,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_it_never_exceeds_its_bounds_and_takes_no_share(steps: list[tuple[str, int, str]]) -> None:
    clock = [0.0]
    kept = store(6, clock=clock)
    alive = dict[str, tuple[float, StoredResponse]]()  # everything put, by its id, if nothing dropped it
    for number, (owner, size, what) in enumerate(steps):
        if what == "wait":
            clock[0] += size / 400
        elif what == "delete" and alive:
            name, (_, one) = next(iter(alive.items()))
            if has(kept, one):
                kept.delete(one.response_id, one.tenant, param="id")
            del alive[name]
        else:
            before = {name: one for name, (_, one) in alive.items() if has(kept, one)}
            one = entry(number, owner, size)
            fits = kept.put(one)
            assert fits == has(kept, one)
            alive[one.response_id] = clock[0], one
            lost = [other for other in before.values() if not has(kept, other)]
            owners = {other.owner for other in before.values()} | {owner}
            for other in lost:
                mine = [each for each in before.values() if each.owner == other.owner]
                mine += [one] if other.owner == owner else []
                n_bytes = sum(each.n_bytes for each in mine)
                assert len(mine) > 6 / len(owners) or n_bytes > MAX_BYTES / len(owners), "it had its share"
        present = [one for _, one in alive.values() if has(kept, one)]
        assert len(kept) == len(present) <= 6
        assert kept.n_bytes == sum(one.n_bytes for one in present) <= MAX_BYTES
        for put_at, one in alive.values():
            assert not has(kept, one) or clock[0] < put_at + 60


def test_a_stranger_who_fills_it_evicts_only_its_own() -> None:
    kept = store()
    mine = [entry(i, "me") for i in range(5)]
    for one in mine:
        assert kept.put(one)
    for i in range(100, 200):
        assert kept.put(entry(i, "stranger", 8_800))
    assert all(has(kept, one) for one in mine)
    assert len(kept) <= 10 and kept.n_bytes <= MAX_BYTES


def test_many_strangers_leave_an_equal_share() -> None:
    kept = store()
    mine = [entry(i, "me") for i in range(10)]
    for one in mine:
        kept.put(one)
    for i in range(4):
        kept.put(entry(100 + i, f"stranger {i}"))
    assert [has(kept, one) for one in mine] == [False] * 4 + [True] * 6, "the oldest go first"


def test_a_response_that_is_too_large_is_not_kept() -> None:
    kept = store()
    assert kept.put(entry(1, "me", kept.largest - 100))
    assert not kept.put(entry(2, "me", MAX_BYTES // 4))
    assert len(kept) == 1


def test_a_response_expires() -> None:
    clock = [0.0]
    kept = store(seconds=5.0, clock=clock)
    first, second = entry(1, "me"), entry(2, "me")
    kept.put(first)
    clock[0] = 4.0
    kept.put(second)
    assert has(kept, first) and has(kept, second)
    clock[0] = 5.0
    assert not has(kept, first) and has(kept, second)
    assert len(kept) == 1
    clock[0] = 9.0
    assert not has(kept, second) and kept.n_bytes == 0


def test_a_tenant_finds_only_its_own() -> None:
    kept = store()
    kept.put(entry(1, "me"))
    for tenant in ("you", ""):
        with pytest.raises(UnknownResponse) as raised:
            kept.get("resp_1", tenant, param="previous_response_id")
        assert raised.value.param == "previous_response_id"
        with pytest.raises(UnknownResponse):
            kept.delete("resp_1", tenant, param="id")
    assert len(kept) == 1
