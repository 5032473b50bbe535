"""Structured output: compiles a JSON schema, a regular expression, choices or Lark, and follows an output.

llguidance does the work, on the host: it follows the output's bytes through the grammar and computes which
tokens of the vocabulary may follow. Compilation has a time limit, in addition to the size limits of
source.py. A grammar that exceeds them is rejected before it runs; if it exceeds them later, that output ends.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from orca_jax.errors import OutputFailed, QueueFull, is_failure
from orca_jax.grammar.memory import KEPT_BYTES, MAX_BYTES, HeapGrowth, LiveGrammars, grown_by
from orca_jax.grammar.schema_document import CannotFollow
from orca_jax.grammar.source import GrammarText, grammar_text, refuse, shortened
from orca_jax.grammar.token_mask import Words, has, words_of
from orca_jax.request.output_form import PLAIN_TEXT, OutputForm
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer

COMPILE_SECONDS = 2.0  # of a processor: limit of a compilation; and limit of the wait for a place before it
COMPILE_PATIENCE = 5  # times that: how long a busy machine may take for it
COMPILE_PLACES = 3  # concurrent compilations; a timed-out one keeps its place until it finishes
COMPILE_STACK_BYTES = 256 << 20  # of address space; llguidance recurses, 3,000 rules in a chain take 8 MB
N_KEPT = 64  # cached grammars, compiled or rejected; compiled ones within KEPT_BYTES
N_TRIED = 8  # tokens of the trial output after compiling: a grammar that fails at once is rejected here

_FORCED_BYTES = 16  # of a text that must follow: how many are read for each token that is wanted

# A thread's clock of its processor time; None on macOS.
_clock_of = getattr(time, "pthread_getcpuclockid", None)
_stack_size = threading.Lock()  # the stack size of new threads is one setting for the whole process


class GrammarCompiler:
    """Compiles requests' grammars and caches the last ones. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's, which may have ids that the tokenizer does not know.

        Takes 0.2 s for 50,000 tokens, and holds the GIL meanwhile.
        """
        self._vocabulary = _Vocabulary.of(tokenizer, vocab_size, frozenset(eos_token_ids))
        self._places = threading.BoundedSemaphore(COMPILE_PLACES)
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarText, Grammar | str] = OrderedDict()  # or why it was rejected
        self._live = LiveGrammars()

    def compile(self, sampling: SamplingParams, form: OutputForm = PLAIN_TEXT) -> "Grammar | None":
        """The grammar that `sampling` and `form` ask for; None if they ask for none.

        Raises InvalidSamplingParameter, which names the field, if the grammar is malformed, allows no output
        or is too large; QueueFull if too many are being compiled, or if the grammars in use leave no memory
        for another, or the machine has no time for it. Returns within 2 `COMPILE_SECONDS`, on a busy machine
        `COMPILE_PATIENCE` times that; releases the GIL except for some milliseconds.
        """
        source = grammar_text(sampling, form)
        if source is None:
            return None
        if source.around is not None:
            self.compile(sampling)  # so that a mistake in the request's own grammar is reported as such
        with self._lock:
            known = self._kept.get(source)
            if known is not None:
                self._kept.move_to_end(source)
        if known is None or (isinstance(known, Grammar) and known.worn):
            self._make_room()
            known = self._compile_in_thread(source)
        if isinstance(known, str):
            refuse(source.field, known)
        return known

    def _make_room(self) -> None:
        """Evict the oldest cached grammars until there is room."""
        while self._live.n_bytes() >= MAX_BYTES:
            with self._lock:
                oldest = next(
                    (each for each, known in self._kept.items() if isinstance(known, Grammar)), None
                )
                if oldest is not None:
                    del self._kept[oldest]
            if oldest is None:
                n = MAX_BYTES >> 20
                raise QueueFull(
                    f"the grammars of running requests take {n} MiB, the maximum; try again later"
                )

    def _compile_in_thread(self, source: GrammarText) -> "Grammar | str":
        """Compile, with a timeout, in a thread whose stack no allowed text can overflow."""
        if not self._places.acquire(timeout=COMPILE_SECONDS):
            raise QueueFull(f"{COMPILE_PLACES} other grammars are being compiled; try again later")
        too_long = f"compiling it takes more than {COMPILE_SECONDS:g} s"
        results: list[Grammar | str] = []
        clocks = list[int]()  # the thread's, once it runs
        done = threading.Event()

        def run() -> None:
            if _clock_of is not None:
                clocks.append(_clock_of(threading.get_ident()))
            try:
                results.append(self._compile(source))
            except BaseException as error:  # llguidance is written in Rust: its panics are not an Exception
                results.append(shortened(str(error)))
            # If it only waited for a processor, the next request can use it.
            self._keep(source, results[0] if time.thread_time() <= COMPILE_SECONDS else too_long)
            self._places.release()
            done.set()

        try:
            with _stack_size:
                before = threading.stack_size(COMPILE_STACK_BYTES)
                try:
                    threading.Thread(target=run, name="grammar", daemon=True).start()
                finally:
                    threading.stack_size(before)
        except BaseException:  # the thread could not be started
            self._places.release()
            raise
        if _done_in_time(done, clocks):
            return results[0]
        self._keep(source, too_long, unless_known=True)
        return too_long

    def _keep(self, source: GrammarText, known: "Grammar | str", *, unless_known: bool = False) -> None:
        with self._lock:
            if not (unless_known and source in self._kept):
                self._kept[source] = known
            self._kept.move_to_end(source)
            n_bytes = sum(each.n_bytes for each in self._kept.values() if isinstance(each, Grammar))
            while len(self._kept) > N_KEPT or (n_bytes > KEPT_BYTES and len(self._kept) > 1):
                _, oldest = self._kept.popitem(last=False)
                n_bytes -= oldest.n_bytes if isinstance(oldest, Grammar) else 0

    def _compile(self, source: GrammarText) -> "Grammar | str":
        growth = HeapGrowth()
        try:
            grammars = source.grammars
        except CannotFollow as error:
            return shortened(str(error))
        matcher = LLMatcher(self._vocabulary.tokenizer, grammars, log_level=0, limits=source.limits)
        if matcher.is_error():
            return shortened(matcher.get_error())
        grammar = Grammar(matcher, self._vocabulary)
        problem = grammar.first_failure()
        if problem is not None:
            return problem
        grammar.n_bytes_compiled = growth.n_bytes()
        self._live.add(grammar)
        return grammar


def _done_in_time(done: threading.Event, clocks: Sequence[int]) -> bool:
    """Wait until a thread is done, or has used COMPILE_SECONDS of processor time by its clock.

    Raises QueueFull if the thread gets too little processor time. Without such a clock, all time counts.
    """
    for _ in range(COMPILE_PATIENCE):
        if done.wait(COMPILE_SECONDS):
            return True
        try:
            if _clock_of is None or (clocks and time.clock_gettime(clocks[0]) > COMPILE_SECONDS):
                return False
        except OSError:  # the thread has ended
            return done.is_set()
    raise QueueFull("the machine is too busy to compile the grammar; try again later")


class Grammar:
    """A compiled grammar, shared by many requests."""

    def __init__(self, matcher: LLMatcher, vocabulary: "_Vocabulary") -> None:
        self.worn = False  # a limit was hit in the shared state: compile it again
        self.n_bytes_compiled = 0
        self.n_masks = 0  # computed for all of its requests
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def n_bytes(self) -> int:
        return self.n_bytes_compiled + grown_by(self.n_masks)

    def start(self) -> "GrammarState":
        """State for a new or resumed request; takes some microseconds. Raises OutputFailed."""
        try:
            matcher = self._matcher.deep_copy()
        except BaseException as error:
            if not is_failure(error):
                raise
            self.worn = True
            raise OutputFailed(f"its grammar cannot be followed: {shortened(str(error))}") from error
        return GrammarState(self, matcher, self._vocabulary)

    def first_failure(self) -> str | None:
        """Why a trial output fails within N_TRIED tokens; None if it does not."""
        state, into = self.start(), np.empty_like(self._vocabulary.text)
        for _ in range(N_TRIED):
            state.allowed(into)
            of_text = into & self._vocabulary.text
            if state.failure is not None or not of_text.any():
                break
            word = int(np.flatnonzero(of_text)[0])
            bits = int(of_text[word])
            if state.accept(32 * word + (bits & -bits).bit_length() - 1):
                break
        return state.failure


class GrammarState:
    """The position of one request's output in its grammar. Not thread-safe.

    `failure` says why the output cannot continue, for example because llguidance hit a limit or panicked;
    None while it can. `is_exhausted` says that the grammar is the cause. No method raises: that would end the
    scheduler's thread, and with it all requests.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocabulary: "_Vocabulary") -> None:
        self.failure: str | None = None
        self.is_exhausted = False
        self._grammar = grammar
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words = np.empty(vocabulary.n_words, np.int32)  # as llguidance writes them
        self._address = self._words.ctypes.data  # cached: looking it up costs more than the mask
        self._allowed = self._words[: len(vocabulary.text)]  # the bits of the model's tokens
        self._is_known = False  # `_words` is current
        self._is_more = True  # text may follow

    def allowed(self, into: Words) -> None:
        """Fill `into`, [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 is 1 if token t may come next.

        End-of-sequence tokens are allowed where the grammar can end. At least one token is always allowed:
        after a failure, all. Releases the GIL.
        """
        if self.failure is None and not self._is_known:
            try:
                self._look_ahead()
            except BaseException as error:
                self._panicked(error)
            if not self._is_more and not self._vocabulary.eos_token_ids and self.failure is None:
                self._fail(
                    "only the end can come next, and the model has no end-of-sequence token", exhausted=True
                )
        into[:] = self._allowed if self.failure is None else self._vocabulary.text

    def accept(self, token_id: int) -> bool:
        """Take the next token; True if the output is complete, or cannot continue (then `failure` is set)."""
        if self.failure is not None or token_id in self._vocabulary.eos_token_ids:
            return True
        try:
            return self._accept(token_id)
        except BaseException as error:
            self._panicked(error)
            return True

    def fork(self) -> "GrammarState":
        """A copy that goes on by itself; takes some microseconds. One that cannot be made has failed."""
        try:
            matcher = self._matcher.deep_copy() if self.failure is None else self._matcher
            copy = GrammarState(self._grammar, matcher, self._vocabulary)
            copy.failure = self.failure
        except BaseException as error:
            copy = GrammarState(self._grammar, self._matcher, self._vocabulary)
            copy._panicked(error)
        return copy

    def n_permitted(self, token_ids: Sequence[int]) -> int:
        """The number of these tokens that may follow, one after the other, with more to come after them."""
        is_text = self._vocabulary.is_text
        n = next((i for i, token_id in enumerate(token_ids) if not is_text(token_id)), len(token_ids))
        try:
            if self.failure is not None or not n:
                return 0
            n = self._matcher.validate_tokens(list(token_ids[:n]))
        except BaseException as error:
            if not is_failure(error):
                raise
            return 0  # what it means for the output shows with its next token
        ahead = self.fork()
        return next((i for i in range(n) if ahead.accept(token_ids[i])), n)

    def forced(self, n: int) -> list[int]:
        """Up to `n` tokens of the text that must follow; the output may have other tokens with this text."""
        ahead = self.fork()  # llguidance goes ahead itself
        try:
            text = b"" if ahead.failure is not None else ahead._matcher.compute_ff_bytes()
            return self._vocabulary.encode(text, n)
        except BaseException as error:
            if not is_failure(error):
                raise
            return []

    def _accept(self, token_id: int) -> bool:
        was_allowed = self._is_known and has(self._allowed, token_id)
        self._is_known = False
        if not self._vocabulary.is_text(token_id):
            self._fail(f"token {token_id} is not text")
        elif not self._matcher.consume_token(token_id) or self._matcher.is_error():
            self._fail(f"it cannot continue after token {token_id}", exhausted=was_allowed)
        if self.failure is not None or self._matcher.is_stopped():
            return True
        if not self._matcher.is_accepting():
            return False
        self._look_ahead()  # it could end here: it must end if nothing can follow
        return self.failure is not None or not self._is_more

    def _look_ahead(self) -> None:
        vocabulary = self._vocabulary
        self._grammar.n_masks += 1
        self._matcher.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
        may_end = int(self._words[vocabulary.end // 32]) >> (vocabulary.end % 32) & 1
        np.bitwise_and(self._allowed, vocabulary.text, out=self._allowed)
        self._is_more = bool(self._allowed.any())
        if not self._is_more and (self._matcher.is_error() or not may_end):
            self._fail("none of this model's tokens can come next", exhausted=True)
        elif may_end:
            np.bitwise_or(self._allowed, vocabulary.eos, out=self._allowed)
        self._is_known = True

    def _fail(self, reason: str, *, exhausted: bool = False) -> None:
        self.is_exhausted = exhausted
        detail = shortened(self._matcher.get_error())
        self.failure = f"{reason}: {detail}" if detail else reason
        self._grammar.worn = True

    def _panicked(self, error: BaseException) -> None:
        """Record an exception or panic; the matcher is not used after that."""
        if not is_failure(error):
            raise error
        self.failure = f"llguidance failed: {shortened(str(error))}"
        self._grammar.worn = True


@dataclass(frozen=True)
class _Vocabulary:
    """The model's tokens. The grammar's end is an extra token after them, so the model needs none."""

    tokenizer: LLTokenizer
    eos_token_ids: frozenset[int]
    end: int  # the token id that marks the grammar's end in llguidance
    n_words: int  # of llguidance's masks, which include a bit for `end`
    text: Words  # [ceil(vocab_size / 32)], bits of the tokens that have bytes, and of special ones
    eos: Words  # [ceil(vocab_size / 32)], bits of the end-of-sequence tokens
    encode_inside: Callable[[str], list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> "_Vocabulary":
        eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        tokens = [b"" if i in eos_token_ids else tokenizer.token_bytes(i) for i in range(vocab_size)]
        special = {
            i: name.encode() for i, name in tokenizer.special_names() if i < vocab_size and not tokens[i]
        }
        special = {i: name for i, name in special.items() if i not in eos_token_ids}
        for i, name in special.items():
            tokens[i] = name
        return cls(
            tokenizer=LLTokenizer(TokenizerWrapper(_Tokens(tokens, tuple(special)))),
            eos_token_ids=eos_token_ids,
            end=vocab_size,
            n_words=vocab_size // 32 + 1,
            text=words_of((i for i, token in enumerate(tokens) if token), vocab_size),
            eos=words_of(eos_token_ids, vocab_size),
            encode_inside=tokenizer.encode_inside,
        )

    def encode(self, text: bytes, n: int) -> list[int]:
        """The first `n` tokens of a text, which may end within a character."""
        read = text[: n * _FORCED_BYTES].decode("utf-8", "ignore")
        return self.encode_inside(read)[:n] if read else []

    def is_text(self, token_id: int) -> bool:
        return 0 <= token_id < self.end and has(self.text, token_id)


class _Tokens:
    """The tokenizer interface that llguidance needs. A token without bytes is never allowed; a special one,
    only where a grammar names it by its id.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        self.special_token_ids = special_token_ids
        self.tokens = [*tokens, b""]
        self.eos_token_id = len(tokens)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens that llguidance would force; none, because forcing is turned off."""
        return []
