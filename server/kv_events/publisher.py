"""Publishes the changes of the prefix cache, in numbered batches of events, on a separate thread."""

import logging
import threading
import time
from collections.abc import Iterator

import zmq
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from orca_jax.errors import ConfigError
from orca_jax.scheduling.kv_manager import KVManager
from server.kv_events.batch import Cleared, Event, EventQueue, batches, encoded
from server.kv_events.replay_log import ReplayLog, ReplayServer, sequence_bytes

LOGGER = logging.getLogger("orca.kv_events")

_LOOK_SECONDS = 0.02  # between two checks of the queue: the longest wait of an event
_WAITING_MESSAGES = 1000  # for each subscriber, of about 64 KiB at most; a slow one misses later messages
_LINGER_MILLISECONDS = 500


class Publisher:
    """A PUB socket, and with `replay_endpoint` a ROUTER socket for batches that subscribers missed.

    As in vLLM, an `endpoint` with a wildcard, "::" or no host is bound, and any other connected to, so that
    one subscriber can collect from many engines. Batches are numbered. If events were dropped because the
    queue was full, the next batch skips a number and says that the cache is empty, so that no subscriber
    keeps blocks whose removal was dropped.

    `start` expects an empty cache; `close` ends the thread. Raises ConfigError for an unusable address.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        queue: EventQueue | None = None,
        log: ReplayLog | None = None,
    ) -> None:
        self._topic = topic.encode()
        self._queue = EventQueue() if queue is None else queue
        self._log = ReplayLog() if log is None else log
        self._block_size = 0
        self._number = 0  # the next batch's
        self._n_batches = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        self._replays: ReplayServer | None = None
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _WAITING_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        setting, address = "kv_events", endpoint
        try:
            (self._socket.bind if _is_bound(endpoint) else self._socket.connect)(endpoint)
            if replay_endpoint is not None:
                setting, address = "kv_events_replay", replay_endpoint
                self._replays = ReplayServer(self._context, replay_endpoint, self._topic)
        except zmq.ZMQError as error:
            self._close_sockets()
            message = f"{setting} is {address!r}: {error}; give an address such as tcp://*:5557"
            raise ConfigError(message) from error

    def start(self, kv: KVManager) -> None:
        """Begin to publish the changes of a prefix cache. Raises ConfigError if the manager has none."""
        if kv.prefixes is None:
            raise ConfigError(
                "kv_events publishes what the prefix cache has, and this engine has none; turn "
                "prefix_caching on (it excludes the policy 'orca', deterministic outputs and models with an "
                "encoder), or leave kv_events out"
            )
        assert self._thread is None, "started twice"
        self._block_size = kv.block_size
        kv.prefixes.tell(self._queue)
        self._thread = threading.Thread(target=self._run, name="orca K/V events", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Publish the queued events and end. A second call does nothing."""
        self._stopping.set()
        if self._thread is None:
            self._close_sockets()
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            LOGGER.warning("the thread that publishes K/V events did not end within %g seconds", timeout)

    def collect(self) -> Iterator[Metric]:
        """Yield the publisher's metrics, on any thread."""
        counts = (
            ("kv_event_batches", "Batches of K/V events published.", self._n_batches),
            ("kv_events_dropped", "K/V events dropped because the queue was full.", self._queue.n_dropped),
        )
        for name, documentation, count in counts:
            yield CounterMetricFamily(f"orca_{name}", documentation, value=count)

    # These run on the publisher's thread.

    def _run(self) -> None:
        try:
            while True:
                stopping = self._stopping.is_set()
                events, lost = self._queue.take()
                self._publish(events)
                if lost:
                    self._number += 1  # the gap
                    self._publish([Cleared()])
                if stopping:
                    return
                if self._replays is None:
                    self._stopping.wait(_LOOK_SECONDS)
                else:
                    self._replays.serve(self._log, _LOOK_SECONDS)
        except Exception:
            LOGGER.exception("publishing K/V events has ended")
        finally:
            self._close_sockets()

    def _publish(self, events: list[Event]) -> None:
        for batch in batches(events):
            payload = encoded(batch, time=time.time(), block_size=self._block_size)
            self._socket.send_multipart([self._topic, sequence_bytes(self._number), payload])
            self._log.add(self._number, payload)
            self._number += 1
            self._n_batches += 1

    def _close_sockets(self) -> None:
        if self._replays is not None:
            self._replays.close()
        self._socket.close()
        self._context.term()


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
