"""The engine's side of a line: submits an endpoint process's requests, and sends it their output."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from orca_jax.errors import EngineError, InvalidRequest, OrcaError
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.request.tokenizer import TextStream
from orca_jax.service.orca import Orca
from orca_jax.service.output import PublishedSink
from server.endpoint_processes.line import Line
from server.endpoint_processes.messages import (
    Accepted,
    Delivered,
    Drained,
    End,
    Entry,
    Failure,
    Refused,
    Report,
    Seen,
    Submit,
)

_LOGGER = logging.getLogger("orca.endpoints")
_GRAMMAR_THREADS = 2  # compiling a grammar may take seconds


class RemoteSink(PublishedSink):
    """The output of a request on its way to an endpoint process, which makes text of it.

    Only stop strings need the text here: `stream` is None without any. `add` takes what is to be sent, and
    `forget` the number of a request that has ended.
    """

    __slots__ = ("_add", "_forget", "_n_logprobs", "_n_tokens", "_number", "_request", "_stream", "_versions")

    def __init__(
        self,
        number: int,
        request: Request,
        stream: TextStream | None,
        *,
        add: Callable[[Entry], object],
        forget: Callable[[int], object],
    ) -> None:
        self._number = number
        self._request = request
        self._stream = stream
        self._add, self._forget = add, forget
        self._n_tokens = self._n_logprobs = 0  # sent
        self._versions: tuple[tuple[int, int], ...] = ()  # sent

    def push(self, token_id: int) -> bool:
        return self._stream is not None and self._stream.push(token_id)

    def publish(self, reason: FinishReason | None, failure: EngineError | None) -> None:
        request = self._request
        new = request.final_ids[self._n_tokens :]
        facts: dict[str, Any] | None = None
        # Most tokens come without any other fact.
        if not self._n_tokens or reason is not None or request.weights_versions is not self._versions:
            facts = self._facts(reason, failure)
        if request.logprobs:
            facts = facts or {}
            facts["logprobs"] = request.logprobs[self._n_logprobs :]
            self._n_logprobs = len(request.logprobs)
        self._n_tokens += len(new)
        self._add((self._number, new, reason, facts))
        if reason is not None:
            self._forget(self._number)

    def _facts(self, reason: FinishReason | None, failure: EngineError | None) -> dict[str, Any]:
        """The attributes of the request that the endpoint process needs, and `failure`."""
        request, facts = self._request, dict[str, Any]()
        if request.weights_versions is not self._versions:
            self._versions = facts["weights_versions"] = request.weights_versions
        if not self._n_tokens:
            if request.n_cached:
                facts["n_cached"] = request.n_cached
            if request.prompt_logprobs is not None:
                facts["prompt_logprobs"] = request.prompt_logprobs
        if request.kv_lease is not None:
            facts["kv_lease"] = request.kv_lease
        if reason is not None:
            if failure is not None:
                facts["failure"] = Failure.of(failure)
            for name in ("pooled", "routed"):
                if (value := getattr(request, name)) is not None:
                    facts[name] = value
            if request.kind.found is not None or request.kind.predicted is not None:
                facts["outcome"] = (request.kind.found, request.kind.predicted)
        return facts


class EngineSide:
    """The requests of one endpoint process, from `serve` on until its line breaks.

    `on_report` is called with each report, `on_drained` with the last message, and `on_seen` with the number
    of each status that the process follows, all on the thread of `serve`.
    """

    def __init__(
        self,
        line: Line,
        service: Orca,
        name: str,
        *,
        on_report: Callable[[Report], object],
        on_drained: Callable[[Drained], object],
        on_seen: Callable[[int], object],
    ) -> None:
        self._line = line
        self._service = service
        self._name = name
        self._on_report, self._on_drained, self._on_seen = on_report, on_drained, on_seen
        self._entries: list[Entry] = []  # threads append, and the scheduler's removes
        self._live: dict[int, Request] = {}
        # Requests that ended before they were submitted, because their grammars took long.
        self._ended = deque[int](maxlen=4096)
        self.n_left = 0  # requests that the line's end cut short
        self._compiling = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix=f"orca-grammars-{name}")

    def serve(self) -> None:
        """Handle the messages of the line until it breaks; then end the requests that are left."""
        handlers: Mapping[type, Callable[[Any], object]] = {
            Submit: self._take,
            End: self._end,
            Report: self._on_report,
            Drained: self._on_drained,
            Seen: lambda seen: self._on_seen(seen.number),
        }
        try:
            for message in self._line.messages():
                handlers[type(message)](message)
        finally:
            self._compiling.shutdown(wait=False, cancel_futures=True)
            left = list(self._live.copy().values())
            self.n_left = len(left)
            for request in left:
                self._service.pool.end(request, FinishReason.CANCELLED)

    def flush(self) -> None:
        """Send what has been published since the last call. On the scheduler's thread, once an iteration."""
        n = len(self._entries)
        if n:
            self._line.send(Delivered(self._entries[:n]))
            del self._entries[:n]

    def _take(self, submit: Submit) -> None:
        if submit.sampling.grammar is None and submit.form.lark is None:
            self._submit(submit)
        else:
            self._compiling.submit(self._submit, submit)

    def _submit(self, submit: Submit) -> None:
        try:
            try:
                request, stream = self._new_request(submit, submit.request_id)
                self._enter(submit, request, stream)
            except InvalidRequest as error:
                if error.param != "request_id":
                    raise
                # As in Gateway.submit: an id that no client can choose.
                other_id = f"{submit.request_id} #{self._name}.{submit.number}"
                request, stream = self._new_request(submit, other_id)
                self._enter(submit, request, stream)
        except OrcaError as error:
            self._line.send(Refused(submit.number, Failure.of(error)))
        except Exception:  # one request's fault must not cost the others of its process
            _LOGGER.exception("request %s could not be submitted", submit.request_id)
            failure = Failure(
                EngineError, "the request failed in an unexpected way; the server's log has more"
            )
            self._line.send(Refused(submit.number, failure))
        else:
            self._line.send(Accepted(submit.number, request.seed))

    def _new_request(self, submit: Submit, request_id: str) -> tuple[Request, TextStream | None]:
        service, prompt = self._service, submit.prompt
        rules = service.rules(submit.sampling, submit.form)
        tenant, salt, *_ = prompt.cache_salt
        checked = service.check(
            prompt.encoder_ids or prompt.token_ids,
            rules,
            SchedulingParams(
                priority=prompt.priority,
                cache_salt=salt or None,
                adapter=None if prompt.adapter is None else prompt.adapter.name,
                kv_transfer=prompt.kv_transfer,
            ),
            tenant=tenant,
            decoder_ids=prompt.token_ids if prompt.encoder_ids else None,
            pooling=prompt.pooling,
        )
        if prompt.scored_ids:
            checked = replace(checked, scored_ids=prompt.scored_ids)
        request, _ = service.new_request(checked, rules, request_id=request_id, owner=submit.owner)
        return request, rules.text_stream(prompt.token_ids) if submit.sampling.stop else None

    def _enter(self, submit: Submit, request: Request, stream: TextStream | None) -> None:
        number, live = submit.number, self._live
        sink = RemoteSink(number, request, stream, add=self._entries.append, forget=live.pop)
        live[number] = request
        try:
            self._service.enter(request, sink)
        except BaseException:
            del live[number]
            raise
        if number in self._ended:
            self._service.pool.end(request, FinishReason.CANCELLED)

    def _end(self, end: End) -> None:
        request = self._live.get(end.number)
        if request is None:
            self._ended.append(end.number)
        else:
            self._service.pool.end(request, end.reason)
