"""Ray Serve's router for the engines: orders them by prefix_choice.py, and Ray sends the request."""

from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.ray.asgi_call import HttpCall
from server.ray.routing.prefix_choice import NO_KEY, Ongoing, PrefixChoice, RoutingKey
from server.ray.scaling import LOAD


class PrefixRouter(RequestRouter):
    """Chooses an engine by the `key` of an HttpCall. Each door has a router, and routers share no memory.

    It has no FIFOMixin, which would send the first request in line to the engine chosen for another.
    """

    # Ray asks an engine how many requests it has, and goes on to the next if no answer comes within a tenth
    # of a second. An engine on a busy machine may take longer, and any other one computes the whole prompt.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, *, places: int = 32) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set up, with the number of requests in a full batch as `places`."""
        self._places = places
        self._choice = PrefixChoice()
        self._ongoing = Ongoing()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Order the replicas, the best first. If none accepts the request, Ray asks again later."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key, pressures = _key(pending_request), {n: self._pressure(n, one) for n, one in replicas.items()}
        order = self._choice.order(key.prefix, pressures, key.adapter)
        self._choice.sent(key.prefix, order[0], key.adapter)
        self._ongoing.chose(pending_request.metadata.internal_request_id, order[0])
        return [[replicas[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note which replica accepted the request: nearly always the first choice."""
        key = _key(pending_request)
        self._choice.sent(key.prefix, replica_id.unique_id, key.adapter)
        self._ongoing.arrived(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request that has ended or failed."""
        self._ongoing.ended(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone. Ray calls this for every change of replicas or their loads."""
        super().update_replicas(replicas)
        self._keep(replica.replica_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica whose process is gone."""
        super().on_replica_actor_died(replica_id)
        self._keep(self.curr_replicas)

    def _keep(self, replica_ids: Iterable[ReplicaID]) -> None:
        self._choice.keep({replica_id.unique_id for replica_id in replica_ids})

    def _pressure(self, name: str, replica: RunningReplica) -> float:
        """Compute how full a replica is. Its report is late, but counts the requests of all doors."""
        reported: dict[str, Any] = replica.routing_stats
        return max(self._ongoing.count(name) / self._places, reported.get(LOAD, 0.0))


def _key(request: PendingRequest) -> RoutingKey:
    call = request.args[0] if request.args else None
    return call.key if isinstance(call, HttpCall) else NO_KEY
