"""This engine, offline."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import jax

from bench.peers.child import Play, Playing, serve
from bench.peers.deliveries import delivered, versions
from orca_jax import LLM, SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.generation import Generation


def start(flags: dict[str, Any], closing: ExitStack) -> tuple[Play, dict[str, Any]]:
    """`flags`: checkpoint, dtype, max_batch_size; `arguments` may have beams, and more arguments of LLM."""
    # Compile every program before the first timed iteration.
    arguments = {
        "max_batch_size": flags["max_batch_size"],
        "dtype": flags["dtype"],
        "compile_ahead": True,
        **flags.get("arguments", {}),
    }
    beams = arguments.pop("beams", None)
    search: dict[str, Any] = {} if beams is None else {"use_beam_search": True, "best_of": beams}
    llm = closing.enter_context(LLM(flags["checkpoint"], **arguments))

    def play(playing: Playing) -> None:
        service = llm.service
        rules = [
            service.rules(
                SamplingParams(max_tokens=request.n_output, temperature=0.0, ignore_eos=True, **search)
            )
            for request in playing.requests
        ]

        scheduling = SchedulingParams(cache_salt=playing.salt)
        if beams is None:
            service.on_delivered = partial(delivered, playing)
        try:
            running: dict[int, Generation] = {}
            while indices := playing.next_arrivals():
                running |= {
                    i: service.submit(
                        playing.requests[i].prompt, rules[i], request_id=str(i), scheduling=scheduling
                    )
                    for i in indices
                }
            for i, generation in running.items():
                result = generation.result()
                if beams is not None:
                    playing.done(i, result.token_ids)
        finally:
            service.on_delivered = None

    return play, {
        "versions": versions(),
        "flags": {**arguments, "beams": beams, "n_slots": llm.serving.n_slots, "attention": llm.attention},
        "device": str(jax.devices()[0].device_kind),
    }


if __name__ == "__main__":
    serve(start)
