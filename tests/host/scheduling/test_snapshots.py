"""Snapshots of recurrent layers' states: where prompts of hybrids are found again, and what they may take.

That each row goes on from exactly its own tokens is checked over random traces in test_serving_policy.py.
"""

from collections.abc import Sequence

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.scheduling.host_tier import HostCopies, HostTier
from orca_jax.scheduling.prefix_cache import PrefixCache
from orca_jax.scheduling.restart import change_weights
from orca_jax.scheduling.snapshots import Snapshots
from orca_jax.simulation.simulation import Simulation
from tests.host.scheduling.found_tokens import asked, run

SIZE = 4  # of a block
LEAST = 4 * SIZE  # tokens between two snapshots of a request


def simulation(*, n: int = 8, every: int = 100, chunked: bool = True) -> Simulation:
    """An engine with `n` snapshots."""
    return Simulation(
        ServingConfig(
            max_batch_size=8,
            n_slots=4096,
            block_size=SIZE,
            max_batch_tokens=256,
            n_snapshots=n,
            scheduling=SchedulingConfig(snapshot_blocks=every, chunked_prefill=chunked),
        )
    )


def a_prompt(n: int, of: int = 0) -> list[int]:
    return [(7 * i + 31 * of) % 101 for i in range(n)]


def test_each_turn_of_a_conversation_finds_the_one_before():
    on = simulation()
    prompt = a_prompt(50)
    for turn in range(8):
        request = asked(prompt, n_output=30)
        (found,) = run(on, request)
        if turn:  # all but the last answer's end
            assert len(prompt) - 10 - LEAST - SIZE <= found < len(prompt) - 10
        prompt += [*request.output_ids, *a_prompt(10, of=turn + 1)]
    assert len(on.kv.snapshots or ()) <= 8


def test_a_prompt_is_found_to_its_last_border_also_by_requests_that_came_with_it():
    on = simulation()
    assert run(on, *(asked(a_prompt(50)) for _ in range(5))) == [0, 48, 48, 48, 48]
    assert run(on, asked(a_prompt(48))) == [0], "its last token is computed for the next one"
    assert run(on, asked(a_prompt(48))) == [44]


def test_prompts_that_differ_after_a_beginning_leave_a_snapshot_there():
    on = simulation()
    beginning = a_prompt(43)
    assert run(on, asked(beginning + a_prompt(40, of=1))) == [0]
    assert run(on, asked(beginning + a_prompt(40, of=2))) == [0], "blocks are found, and no state"
    assert run(on, asked(beginning + a_prompt(40, of=3))) == [40]
    assert run(on, asked(beginning + a_prompt(40, of=3), salt=("another tenant",))) == [0]


def test_a_long_prompt_has_snapshots_at_every_so_many_blocks():
    on = simulation(every=5)
    prompt = a_prompt(91)
    run(on, asked(prompt))
    finds = [run(on, asked(prompt[:n] + [100, 100]))[0] for n in (90, 59, 41, 19)]
    assert finds == [80, 40, 40, 0]  # the last border, 88, is too near


def test_whole_prompts_make_snapshots_only_where_they_end():
    """Without chunks a prompt is one piece; outputs pass borders all the same."""
    on = simulation(chunked=False)
    prompt = a_prompt(50)
    first = asked(prompt, n_output=30)
    assert run(on, first, *(asked(prompt) for _ in range(3))) == [0, 0, 0, 0]
    assert run(on, asked([*prompt, *first.output_ids])) == [68]


def test_the_snapshot_used_longest_ago_makes_room():
    on = simulation(n=2)
    for of in (1, 2, 1, 3):  # the second 1 is found
        run(on, asked(a_prompt(30, of)))
    assert on.kv.snapshots is not None
    assert (len(on.kv.snapshots), on.kv.snapshots.n_made, on.kv.snapshots.n_evicted) == (2, 3, 1)
    assert run(on, asked(a_prompt(30, 1)), asked(a_prompt(30, 3))) == [28, 28]
    assert run(on, asked(a_prompt(30, 2))) == [0]


def test_new_weights_forget_all_snapshots():
    on = simulation()
    run(on, asked(a_prompt(50)))
    change_weights(on.scheduler, 1)
    assert on.kv.snapshots is not None and len(on.kv.snapshots) == 0
    assert run(on, asked(a_prompt(50))) == [0]


def test_a_snapshot_goes_with_its_block():
    snapshots = Snapshots(1, n_rows=1, block_size=SIZE, every=1)
    cache = PrefixCache(snapshots)
    snapshots.make(0, SIZE, prompt=9, known=b"a", shared=False)
    cache.add(7, b"a")
    snapshots.name(0, 1, b"a")
    assert cache.find([b"a"], 1) == [7]
    cache.release([7])
    cache.evict()
    assert len(snapshots) == 0


def with_host(n: int, *, n_on_host: int) -> tuple[Snapshots, HostTier]:
    """`n` snapshots, of the first letters of b"abc", and of the next `n_on_host` in the host tier alone."""
    host = HostTier(4)
    snapshots = Snapshots(n, n_rows=4, block_size=SIZE, every=1, host=host)
    for i, letter in enumerate(b"abc"[: n + n_on_host]):
        block_hash = bytes([letter])
        if i < n:
            snapshots.make(0, SIZE * (i + 1), prompt=99, known=block_hash, shared=True)
            snapshots.name(0, i + 1, block_hash)
        else:
            host.store(block_hash, 77)
    snapshots.begin()
    host.begin()
    return snapshots, host


def began(snapshots: Snapshots, hashes: Sequence[bytes]) -> None:
    """Let rows 1, 2, ... begin after these."""
    held = [snapshots.hold(each) for each in hashes]
    for row, (each, found) in enumerate(zip(hashes, held, strict=True), 1):
        snapshots.use(found, each, row, SIZE)


def test_a_state_from_the_host_is_a_snapshot_again():
    snapshots, host = with_host(1, n_on_host=1)
    began(snapshots, [b"b", b"b"])
    assert host.copies == HostCopies([(4, 1)], [(0, 4)]), "what was the only snapshot goes out before"
    assert snapshots.copies.before == [(4, 1), (4, 2)] and host.n_read == 1
    snapshots.begin()
    began(snapshots, [b"b"])
    assert snapshots.copies.before == [(4, 1)] and host.n_read == 1, "it is on the devices"
    snapshots.begin()
    host.begin()
    began(snapshots, [b"a"])
    assert host.copies == HostCopies([], [(1, 4)]), "the other one is on the host already"


def test_a_state_from_the_host_takes_no_snapshot_s_place_from_which_another_row_begins():
    """The host's states are copied before the rows' own, so such a place would have another state by then."""
    snapshots, host = with_host(1, n_on_host=1)
    began(snapshots, [b"b", b"a"])
    assert host.copies == HostCopies([], [(0, 1)]) and snapshots.copies.before == [(4, 2)]
    assert b"a" in snapshots and b"b" not in snapshots


def test_two_states_from_the_host_never_come_to_one_place():
    snapshots, host = with_host(1, n_on_host=2)
    began(snapshots, [b"b", b"c"])
    assert host.copies == HostCopies([(4, 2)], [(0, 4), (1, 2)]) and snapshots.copies.before == [(4, 1)]
