"""Log-probabilities as a person reads them."""

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.tokenizer import Tokenizer


def logprob_table(title: str, logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> Table:
    """A row for each token: its id and text, the logarithm of its probability, and the likeliest tokens.

    Texts are written as Python writes them, so that blanks and newlines are seen and nothing is obeyed.
    """
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE, pad_edge=False)
    table.add_column("token", justify="right")
    table.add_column("text", overflow="fold")
    table.add_column("logprob", justify="right")
    table.add_column("%", justify="right")
    has_top = any(one.top for one in logprobs)
    if has_top:
        table.add_column("likeliest, %", overflow="fold")
    for one in logprobs:
        row = [
            str(one.token_id),
            _shown(one.token_id, tokenizer),
            f"{one.logprob:.3f}",
            _percent(one.logprob),
        ]
        if has_top:
            row.append("  ".join(f"{_shown(i, tokenizer) or i} {_percent(value)}" for i, value in one.top))
        table.add_row(*map(Text, row))  # Text: what stands in square brackets is no style here
    return table


def _shown(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Empty for a special token, as well as where there is no tokenizer."""
    text = "" if tokenizer is None else tokenizer.decode([token_id])
    return repr(text) if text else ""


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):.1f}"
