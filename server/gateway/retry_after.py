"""When a client that found the queue full should try again."""

import math

from server.gateway.gateway import Gateway

_LONGEST_SECONDS = 60


def retry_after_seconds(gateway: Gateway) -> int:
    """Whole seconds, 1 to 60: as long as the requests that wait now take to end, at the pace of late.

    1 where there is no pace yet to judge by.
    """
    if gateway.served is None:
        return 1
    service = gateway.served.service
    interval = service.timeline.recent_finish_interval()
    if interval is None:
        return 1
    return min(max(math.ceil(interval * service.pool.n_waiting), 1), _LONGEST_SECONDS)
