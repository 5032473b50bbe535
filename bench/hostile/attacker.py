"""All attacks by name, and the process that runs them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.hostile import bodies, connections, generations, rpc
from bench.hostile.target import Answers, Target
from bench.other_process import answer_each

Attack = Callable[[Target], Awaitable[None]]

BUSY = "busy"  # an order to compute and send nothing, as a control
GRACE_SECONDS = 10.0  # extra time for an attack to notice that it is over

ATTACKS: dict[str, Attack] = {
    attack.__name__.replace("_", "-"): attack
    for room in (bodies, generations, connections, rpc)
    for attack in room.ATTACKS
}


@dataclass(frozen=True, slots=True)
class Order:
    """Attack the server at `http` and `rpc` for `seconds`, in round `number`."""

    name: str
    http: tuple[str, int]
    rpc: str
    seconds: float
    number: int = 0


def attacker(connection: Connection) -> None:
    """The program of an OtherProcess: carries out each Order and answers with Answers."""
    answer_each(connection, attack)


async def attack(order: Order) -> Answers:
    """Run one attack, for at most its time plus GRACE_SECONDS."""
    if order.name == BUSY:
        end = time.monotonic() + order.seconds
        while time.monotonic() < end:
            pass
        return Answers()
    target = Target(order.http, order.rpc, seconds=order.seconds, number=order.number)
    try:
        async with asyncio.timeout(order.seconds + GRACE_SECONDS):
            await ATTACKS[order.name](target)
    except TimeoutError:
        target.answers.note("had to be stopped")
    return target.answers
