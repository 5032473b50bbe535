"""The score of a pair of texts: how likely the second is after the first, as the model says it.

It is the mean log-probability per token of the second text, given the first and what a template puts around
them. docs/embeddings.md has the exact definition.
"""

from collections.abc import Sequence
from typing import NamedTuple

from orca_jax.errors import InvalidRequest
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.scores import given_output
from server.gateway.gateway import LiveRequest, Submission
from server.gateway.served_model import ServedModel
from server.http.generation.answer import each

MAX_TEMPLATE = 8192  # characters


class Template(NamedTuple):
    """A text around two others: `before`, the first text, `between`, the second text."""

    before: str
    between: str


def template_of(text: str, first: str, second: str) -> Template:
    """A template with both names in braces, the second at its end. Raises InvalidRequest."""
    names = f"{{{first}}}", f"{{{second}}}"
    before, found, rest = text.partition(names[0])
    between, _, after = rest.partition(names[1])
    if not found or not rest.endswith(names[1]) or after or names[1] in before or names[0] in rest:
        message = f"template is {text[:100]!r}; it must have {names[0]} once and then, at its end, {names[1]}"
        raise InvalidRequest(message, param="template")
    return Template(before, between)


class Pair(NamedTuple):
    """A pair's request, and how many of its last tokens are the second text's."""

    submission: Submission
    n_scored: int

    @property
    def n_tokens(self) -> int:
        """Those of both texts and of the template."""
        return len(self.submission.prompt.token_ids) + len(self.submission.prompt.given_ids)


def pairs(
    model: ServedModel,
    texts: Sequence[tuple[str, str]],
    template: Template,
    scheduling: SchedulingParams,
    *,
    tenant: str,
    response_id: str,
    params: tuple[str, str],
) -> list[Pair]:
    """Tokenize and check all pairs; `params` are the fields of their first and second texts.

    Raises a leaf of InvalidRequest, which names the pair.
    """
    first, second = params

    def checked(numbered: tuple[int, tuple[str, str]]) -> Pair:
        i, (context, target) = numbered
        before = model.encode(template.before + context + template.between, param=first)
        after = model.encode(target, param=second, add_special_tokens=False)
        for ids, param in ((before, first), (after, second)):
            if not ids:
                message = f"{param} has no tokens; it needs at least one"
                raise InvalidRequest(message, param=param)
        given = given_output(model.service, [*before, *after], len(before), scheduling, tenant=tenant)
        return Pair(Submission(given.prompt, given.rules, f"{response_id}-{i}"), len(after))

    return each(list(enumerate(texts)), checked, "pair")


def score_of(request: LiveRequest, pair: Pair) -> float:
    """The mean log-probability of the second text's tokens, once the request has ended."""
    given = len(pair.submission.prompt.given_ids)
    known = [*(request.prompt_logprobs or ()), *request.logprobs[:given]]
    own = known[-pair.n_scored :]
    assert len(own) == pair.n_scored
    return sum(token.logprob for token in own) / len(own)
