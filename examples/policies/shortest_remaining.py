"""Shortest remaining first, by a predicted output length.

Papers: Qiu et al., "Efficient Interactive LLM Serving with Proxy Model-based Sequence Length Prediction"
(2024); Fu et al., "Efficient LLM Scheduling by Learning to Rank" (NeurIPS 2024). Preemption is limited as in
Shahout et al., "Don't Stop Me Now: Embedding Based Scheduling for LLMs" (TRAIL, ICLR 2025): a request that is
nearly done keeps its place. TRAIL predicts again at each token; here the first prediction stays.

The mean latency is the shortest possible if predictions are right and a preemption costs nothing. Long
requests starve while shorter ones keep coming.
"""

import math
import random
from functools import lru_cache

from orca_jax.request.request import Request
from orca_jax.scheduling.serving_policy import ServingPolicy


class ShortestRemaining(ServingPolicy):
    """The request with the fewest predicted output tokens left goes first, and preempts longer ones.

    The prediction is the request's own limit, times a random factor: log-normal, with the standard deviation
    `error` of its logarithm. So 0 is an oracle where requests declare their real lengths, as those of traces
    do. Override `predicted` with a model. A request is not preempted any more once it has `protected` of its
    predicted tokens.
    """

    error = 0.0
    protected = 0.8

    def predicted(self, req: Request) -> float:
        """The predicted number of output tokens."""
        return req.most_output * math.exp(self.error * _normal(req.arrival))

    def order(self, req: Request) -> tuple[float, ...]:
        return self.predicted(req) - len(req.output_ids), req.arrival

    def gives_way(self, admitted: Request, waiting: Request) -> bool:
        return len(admitted.output_ids) < self.protected * self.predicted(admitted)


class RoughlyShortestRemaining(ShortestRemaining):
    """The same with predictions that are off by a factor of 2 or more for half of the requests."""

    error = 1.0


@lru_cache(1 << 16)
def _normal(number: int) -> float:
    return random.Random(number).gauss(0.0, 1.0)
