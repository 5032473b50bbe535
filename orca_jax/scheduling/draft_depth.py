"""The number of tokens that a shared drafter drafts for each request, before the batch verifies them."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from orca_jax.request.request import Request, SharedDrafter

T = TypeVar("T")

# The tokens that an iteration with drafts of these chances yields in its time, which is longer by `more`.
Worth = Callable[[Sequence[float], float], float]

# Depths to choose among: a few, because each is priced.
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def draft_together(
    requests: Sequence[tuple[Request, float]], n_places: int, worth: Worth | None = None
) -> None:
    """Let the shared drafter of these requests draft up to `n_places` tokens in all, if they have one.

    Each request comes with its drafts' chance. A round of the drafter that makes a request's k-th draft takes
    time whether it makes one or many, so the depth of the round is chosen first: that which makes `worth` the
    greatest, the drafter's own time counted. Without `worth`, drafts are made as deep as there are places.
    """
    wanting = [(req, chance, n) for req, chance in requests if (n := req.kind.n_wanted(req)) > 0]
    drafter = wanting[0][0].kind.shared_drafter if wanting else None
    if drafter is None:
        return
    most = max(n for _, _, n in wanting)
    if worth is None:
        wanted, _ = likeliest(wanting, most, n_places)
    else:
        wanted = _best(wanting, n_places, drafter, worth)
    if wanted:
        for (req, _), drafts in zip(wanted, drafter.draft(wanted), strict=True):
            req.kind.take_drafts(req, drafts)


def _best(
    wanting: Sequence[tuple[Request, float, int]], n_places: int, drafter: SharedDrafter, worth: Worth
) -> list[tuple[Request, int]]:
    """The drafts of each request with which the iteration is worth the most; none if none are worth it."""
    best, best_depth, chosen = worth((), 0.0), 0, list[tuple[Request, int]]()
    most = max(n for _, _, n in wanting)
    for depth in (*(depth for depth in _DEPTHS if depth < most), most):
        wanted, chances = likeliest(wanting, depth, n_places)
        value = worth(chances, drafter.cost(wanted))
        if value > best:
            best, best_depth, chosen = value, depth, wanted
    n_chosen = sum(n for _, n in chosen)
    while n_chosen > 1:  # perhaps only the likeliest of them
        n_chosen //= 2
        wanted, chances = likeliest(wanting, best_depth, n_chosen)
        value = worth(chances, drafter.cost(wanted))
        if value > best:
            best, chosen = value, wanted
    return chosen


def likeliest(
    wanting: Sequence[tuple[T, float, int]], depth: int, n_places: int
) -> tuple[list[tuple[T, int]], list[float]]:
    """Up to `depth` drafts of each, the likeliest `n_places` of all, and the chance of each.

    Each has the chance of a draft and the most drafts that it can have.
    """
    chances = [
        (chance**n, i) for i, (_, chance, most) in enumerate(wanting) for n in range(1, min(depth, most) + 1)
    ]
    chances.sort(key=lambda each: -each[0])
    del chances[n_places:]
    counts = Counter(i for _, i in chances)
    return [(wanting[i][0], n) for i, n in sorted(counts.items())], [chance for chance, _ in chances]
