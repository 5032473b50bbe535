"""The control message of an iteration: the rows of all kinds, concatenated in the batch's order."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain, pairwise, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.iteration.message import (
    ADJUSTED,
    BIAS,
    CONSTRAINED,
    DRAFTED,
    POOLS_ALL,
    ROUTED,
    SAMPLED,
    ControlMessage,
    EncoderInputs,
    no_copies,
)
from orca_jax.iteration.rows.encoder import encoder_inputs
from orca_jax.iteration.rows.plain import PlainRows, packed
from orca_jax.request.request import (
    PLAIN,
    InputRow,
    Request,
    RequestState,
    Row,
    RowKind,
    by_kind,
    prompt_chunk,
)

_NO_IDS, _NO_BIASES, _NO_INDICES = np.zeros(0, np.int32), np.zeros(0, BIAS), np.zeros(0, np.intp)
_INCREMENT = RequestState.INCREMENT
_NO_INPUTS: Mapping[int, InputRow] = {}


_Pairs = Sequence[tuple[int, int]]
StateChanges = tuple[_Pairs, _Pairs, _Pairs]
_NO_STATES: StateChanges = ((), (), ())


class KnownTokens(NamedTuple):
    """Rows of increments whose token the host knows.

    `others` has the inputs of the rows whose next token is known too, or does not belong to the output.
    """

    at: npt.NDArray[np.intp]  # the indices of these rows
    token_ids: list[int]
    others: dict[int, InputRow]


class SentRows(NamedTuple):
    """The rows of a message [R]: each one's request, tokens before its input, and row of the block table.

    Of requests of other kinds than the plain one, `inputs` has the input of each row in its initiation, by
    index, and `known` the increments. `first` has the index of each request's first row, and then R; None if
    each request has one row. `places` are those in the batch of the requests that have such inputs.
    """

    requests: Sequence[Request]
    start: npt.NDArray[np.int32]
    input_length: npt.NDArray[np.int32]
    row: npt.NDArray[np.intp]
    inputs: Mapping[int, InputRow] = _NO_INPUTS
    known: KnownTokens | None = None
    first: Sequence[int] | None = None
    places: Collection[int] = ()

    @property
    def groups(self) -> list[range]:
        """The indices of each request's rows."""
        if self.first is None:
            return [range(i, i + 1) for i in range(len(self.requests))]
        return [range(i, end) for i, end in pairwise(self.first)]


class BlockTables(NamedTuple):
    """The K/V manager's arrays that messages are made from, `[n_rows, ...]`; see KVManager."""

    block_size: int
    block_table: npt.NDArray[np.int32]
    n_reserved: npt.NDArray[np.int64]
    encoder_blocks: npt.NDArray[np.int32]
    max_encoder_blocks: int
    rows_of: Callable[[int], Sequence[int]]  # the rows of the request that was admitted to a row


class MessageBuilder:
    """Builds the messages of one engine.

    With `keeps_tokens` the device holds each row's newest token. Without, the host has received a request's
    token before the request is issued again.
    """

    def __init__(self, tables: BlockTables, *, keeps_tokens: bool) -> None:
        self._tables = tables
        self._keeps_tokens = keeps_tokens
        self._plain = PlainRows(tables.n_reserved)

    def rows(self, rows: Sequence[Row]) -> SentRows:
        """The message's rows. A request of another kind than the plain one may have several."""
        requests = [request for request, _ in rows]
        places = [request.row for request in requests if request.kind is PLAIN]
        if len(places) == len(rows):
            return _of_plain(rows, requests, places)
        groups = by_kind(requests)
        if all(cls.knows_ids or cls is RowKind for cls, _ in groups):
            known = [ids for cls, some in groups for ids in cls.known_ids(rows[some])]
            if any(known):
                return _of_increments(rows, requests, known)
            return _of_plain(rows, requests, [request.row for request in requests])  # in a third of the time
        return self._of_all_kinds(rows)

    def _of_all_kinds(self, rows: Sequence[Row]) -> SentRows:
        requests, inputs, others = list[Request](), dict[int, InputRow](), dict[int, InputRow]()
        first, given_at, token_ids = list[int](), list[int](), list[int]()
        # An entry has the numbers of neighbouring rows, as many as a request has known tokens, of which each
        # begins a token after the one before: the row of the block table, tokens before the input, input
        # tokens, rows, and whether the input is known.
        entries = list[tuple[int, int, int, int, bool]]()
        for place, (request, n_tokens) in enumerate(rows):
            n = len(requests)
            first.append(n)
            kind, row = request.kind, request.row
            if kind is PLAIN or not (
                given := kind.rows(request, n_tokens, self._tables.rows_of(row) if kind.forks else (row,))
            ):
                requests.append(request)
                entries.append((row, request.n_computed, n_tokens, 1, False))
                continue
            given_at.append(place)
            # Request.in_initiation, inlined for speed.
            if request.state is not _INCREMENT and request.n_in_flight == request.n_partial:
                for i, each in enumerate(given, n):
                    inputs[i] = each
                    entries.append((each.place, each.start, len(each.ids), 1, False))
                requests += [request] * len(given)
                continue
            for each in given:
                at, start, ids, next_id, answers = each
                n_rows = len(ids)
                entries.append((at, start, 1, n_rows, True))
                token_ids += ids
                requests += [request] * n_rows
                if next_id != SAMPLED or not answers:
                    others.update(dict.fromkeys(range(n, n + n_rows), each))
                n += n_rows
        place_of, start, length, n_rows, known = zip(*entries, strict=True)
        counts = packed(n_rows, np.intp)
        begins = np.add.accumulate(counts) - counts
        starts = (packed(start, np.int32) - begins).repeat(counts) + np.arange(len(requests))
        return SentRows(
            requests,
            starts.astype(np.int32),
            packed(length, np.int32).repeat(counts),
            packed(place_of, np.intp).repeat(counts),
            inputs,
            KnownTokens(packed(known, np.intp).repeat(counts).nonzero()[0], token_ids, others),
            [*first, len(requests)],
            given_at,
        )

    def message(
        self,
        sent: SentRows,
        copies: Sequence[tuple[int, int]] = (),
        states: StateChanges = _NO_STATES,
        host: tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]] = ((), ()),
    ) -> ControlMessage:
        """The message, with the `copies` of blocks to make before its iteration.

        `states` are the copies of recurrent layers' states before it and after it, and the states
        to keep, as (row of the block table, place) in the order of the row's tokens. `host` are
        copies of blocks to the host's memory, and from it.
        """
        requests, start, input_length, row, inputs, given, _, _ = sent
        plain, n = self._plain, len(requests)
        increments = _NO_INDICES if given is None else given.at
        plain.begin(requests, row, start, increments)
        if len(increments):
            plain.end_initiation(row[increments])
        kv_length = start + input_length
        plain.kv_length[row] = kv_length
        initiation = ~plain.has_sampled.take(row)
        initiation_rows: list[int] = initiation.nonzero()[0].tolist()
        known = initiation  # rows whose input the host knows
        answers = None  # rows whose next token belongs to the output; None: the rows that sample
        if sent.places:
            known, answers = initiation.copy(), np.ones(n, np.bool_)
            known[increments] = True
        n_prompt = np.zeros(n, np.int32)
        next_token = n_prompt + np.int32(SAMPLED)  # in half the time of np.full
        row_end = np.add.accumulate(input_length, dtype=np.int32)
        token_ids = np.zeros(row_end[-1], np.int32)
        if given is not None and answers is not None:
            token_ids[row_end.take(increments) - 1] = packed(given.token_ids, np.int32)
            for i, known_row in given.others.items():
                next_token[i], answers[i] = known_row.next_id, known_row.answers
        for i in initiation_rows:
            chunk = inputs.get(i) or prompt_chunk(requests[i], int(input_length[i]))
            token_ids[row_end[i] - len(chunk.ids) : row_end[i]] = chunk.ids
            next_token[i] = chunk.next_id
            if answers is not None:
                answers[i] = chunk.answers
        for i in initiation_rows:
            n_prompt[i] = plain.n_prompt[row[i]]
        samples = next_token == SAMPLED
        if answers is None:
            answers = samples
        token_index = (kv_length - plain.n_prompt.take(row)) * samples
        sampling = plain.sampling.take(row)  # for records ten times as fast as indexing
        if initiation_rows:
            plain.end_initiation(row[initiation & answers])
        for i in (~samples).nonzero()[0].tolist():  # needs no sampler
            sampling["temperature"][i] = 0
            sampling["flags"][i] &= POOLS_ALL | ROUTED
            if not answers[i]:
                sampling["logprobs"][i] = -1
        for i in (plain.has_constraint.take(row) & samples).nonzero()[0].tolist():
            constraint = requests[i].constraint
            assert constraint is not None
            if constraint.acts(int(token_index[i])):
                sampling["flags"][i] |= CONSTRAINED
        if not self._keeps_tokens:
            for i in (~known).nonzero()[0].tolist():
                token_ids[row_end[i] - 1] = requests[i].output_ids[-1]
        if len(increments) and np.count_nonzero(sampling["flags"]):  # mostly no row has flags
            flags = sampling["flags"].take(increments)
            counted = increments[((flags & ADJUSTED) > 0) & samples.take(increments)]
            sampling["flags"][counted] |= DRAFTED
        biases: list[tuple[int, int, float]] = []
        earlier_ids: list[int] = []
        for i in initiation_rows:
            if sampling["flags"][i] & ADJUSTED:
                earlier_ids += requests[i].known_ids(0, int(start[i]))
                biases += [(i, *bias) for bias in requests[i].sampling.logit_bias.items()]
        adapter = plain.adapter.take(row) if plain.has_adapters else None
        table, encoder = self._block_table(requests, row, kv_length)
        return ControlMessage(
            row=row.astype(np.int32),
            initiation=initiation,
            token_index=token_index,
            input_length=input_length,
            kv_length=kv_length,
            n_prompt=n_prompt,
            next_token=next_token,
            token_ids=token_ids,
            earlier_ids=np.array(earlier_ids, np.int32) if earlier_ids else _NO_IDS,
            token_on_device=~known if self._keeps_tokens else np.zeros(n, np.bool_),
            block_table=table,
            sampling=sampling,
            bias=np.array(biases, BIAS) if biases else _NO_BIASES,
            encoder=encoder,
            copies=_pairs(copies),
            to_host=_pairs(host[0]),
            from_host=_pairs(host[1]),
            states_before=_pairs(states[0]),
            states_after=_pairs(states[1]),
            states_kept=_kept(states[2], row),
            adapter=adapter if adapter is not None and adapter.any() else None,
        )

    def _block_table(
        self, requests: Sequence[Request], row: npt.NDArray[np.intp], kv_length: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], EncoderInputs | None]:
        """The used columns of the rows' block tables: few of them in a model with many positions."""
        tables = self._tables
        if not tables.max_encoder_blocks:
            return tables.block_table[row, : -(-int(kv_length.max()) // tables.block_size)], None
        table = tables.block_table.take(row, axis=0)
        return encoder_inputs(requests, table, tables.encoder_blocks[row], tables.max_encoder_blocks)


def _of_plain(rows: Sequence[Row], requests: Sequence[Request], places: Sequence[int]) -> SentRows:
    """The rows of a batch in which each request has one plain row, at these rows of the block table."""
    return SentRows(
        requests,
        packed([request.n_computed for request in requests], np.int32),
        packed([n_tokens for _, n_tokens in rows], np.int32),
        packed(places, np.intp),
    )


def _of_increments(
    rows: Sequence[Row], requests: Sequence[Request], known: Sequence[Sequence[int]]
) -> SentRows:
    """The rows of a batch in which each request has one plain row, or one for each of its `known` ids."""
    n_rows = [len(ids) or 1 for ids in known]
    first = list(accumulate(n_rows, initial=0))
    n, each = first[-1], packed(n_rows, np.intp)
    input_length, is_known = np.ones(n, np.int32), np.ones(n, np.bool_)
    plain = [place for place, ids in enumerate(known) if not ids]
    if plain:
        at = [first[place] for place in plain]
        input_length[at] = [rows[place][1] for place in plain]
        is_known[at] = False
    # Each of a request's rows begins a token after the one before.
    start = packed([request.n_computed - i for request, i in zip(requests, first, strict=False)], np.int32)
    return SentRows(
        list(chain.from_iterable(map(repeat, requests, n_rows))),
        start.repeat(each) + np.arange(n, dtype=np.int32),
        input_length,
        packed([request.row for request in requests], np.intp).repeat(each),
        known=KnownTokens(is_known.nonzero()[0], list(chain.from_iterable(known)), {}),
        first=first,
        places=[place for place, ids in enumerate(known) if ids],
    )


def _kept(places: _Pairs, row: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
    """Pair each place with the index of the row in `row` [R] whose state it keeps."""
    kept = list[tuple[int, int]]()
    first, n_before = -1, 0
    for i, (own, place) in enumerate(places):
        if not i or own != places[i - 1][0]:
            first, n_before = int((row == own).argmax()), 0
        kept.append((first + n_before, place))
        n_before += 1
    return _pairs(kept)


def _pairs(copies: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    return np.array(copies, np.int32) if copies else no_copies()
