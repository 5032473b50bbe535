"""A peer's side of the pipe: questions and answers are lines of JSON, and what a library prints is no answer.

Needs the standard library alone: an engine's environment may have neither this project nor JAX.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Prompts' token ids and output tokens of each request, to the output tokens that came.
Play = Callable[[list[list[int]], list[int]], int]


def serve(start: Callable[[dict[str, Any]], tuple[Play, dict[str, Any]]]) -> None:
    """Start an engine as the first line says, tell about it, and play a trace for each line until they end.

    `start(flags)` gives the way to play a trace and what is to be known of the engine: versions, flags.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an engine's own prints go where its warnings go

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    play, about = start(json.loads(sys.stdin.readline()))
    say(about)
    for line in sys.stdin:
        trace = json.loads(line)
        begin = time.perf_counter()
        n_tokens = play(trace["prompts"], trace["n_outputs"])
        say({"seconds": time.perf_counter() - begin, "n_tokens": n_tokens})
