"""Earliest deadline first: of the first token, or of each token as a reader needs it.

Papers: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment" (1973);
for each token, Liu et al., "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming
Services" (2024). A user reads at a certain speed, so tokens that come earlier than they are read are worth
nothing, and a request that is far ahead of its reader can pause. Andes solves a knapsack problem for the
quality of experience; here the deadlines alone decide, which needs no model of the iteration's time.
"""

from orca_jax.request.request import Request
from orca_jax.scheduling.serving_policy import ServingPolicy


class FirstTokenDeadline(ServingPolicy):
    """The waiting request whose first token is due first is admitted next; nothing is preempted for it.

    It is due `first_seconds` after the arrival, and later for a long prompt, whose users expect to wait.
    """

    first_seconds = 0.25
    prompt_token_seconds = 0.001

    def deadline(self, req: Request) -> float:
        """When the request's first token is due, in seconds of the pool's clock."""
        return req.arrived + self.first_seconds + self.prompt_token_seconds * req.n_input

    def order(self, req: Request) -> tuple[float, ...]:
        return self.deadline(req), req.arrival


class TokenDeadline(FirstTokenDeadline):
    """The request whose next token is due first goes first.

    After the first token one is due each `token_seconds`. An admitted request gives way if its next token is
    due `margin` seconds later than that of the waiting one, because a preemption has a price.
    """

    token_seconds = 0.1
    margin = 1.0

    def deadline(self, req: Request) -> float:
        return super().deadline(req) + self.token_seconds * len(req.output_ids)

    def gives_way(self, admitted: Request, waiting: Request) -> bool:
        return self.deadline(admitted) > self.deadline(waiting) + self.margin
