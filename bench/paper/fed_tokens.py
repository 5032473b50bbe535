"""Input tokens that the host puts in where the device would take the one that it sampled.

The baseline feeds what is left of a long input token by token (bench/paper/request_level.py). With this the
rest of the batch need not wait for its tokens to come to the host and back: the baseline may so issue ahead,
as ORCA does, and neither waits for the host.
"""

import numpy as np

from orca_jax.engine.engine_master import PendingTokens, Workers
from orca_jax.iteration.message import ControlMessage, MakeWords


class FedWorkers:
    """Workers that keep each row's newest token, but for the rows that `feed` named since the last issue."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._fed: dict[int, int] = {}

    def feed(self, row: int, token_id: int) -> None:
        """Let this token go into the next iteration in `row`, which is in its increment phase."""
        self._fed[row] = token_id

    def issue(self, message: ControlMessage, words: MakeWords) -> PendingTokens:
        """The workers', with the fed tokens in the message."""
        if self._fed:
            ends = np.cumsum(message.input_length)
            for i, row in enumerate(message.row.tolist()):
                if row in self._fed:
                    assert not message.initiation[i]
                    message.token_ids[ends[i] - 1] = self._fed.pop(row)
                    message.token_on_device[i] = False
            assert not self._fed, "fed rows are in the batch"
        return self._workers.issue(message, words)
