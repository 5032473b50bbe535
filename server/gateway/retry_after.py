"""When a client should retry after the queue was full."""

import math

from server.gateway.gateway import Gateway

_LONGEST_SECONDS = 60


def retry_after_seconds(gateway: Gateway) -> int:
    """Whole seconds, 1 to 60: how long the waiting requests take to finish at the recent rate.

    1 if too few requests have finished to tell the rate.
    """
    if gateway.served is None:
        return 1
    service = gateway.served.service
    interval = service.timeline.recent_finish_interval()
    if interval is None:
        return 1
    return min(max(math.ceil(interval * service.pool.n_waiting), 1), _LONGEST_SECONDS)
