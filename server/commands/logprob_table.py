"""A table of log-probabilities for the terminal."""

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.tokenizer import Tokenizer


def logprob_table(title: str, logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> Table:
    """A row per token: its id and text, its log-probability, and the most likely tokens.

    Texts are shown as Python literals: whitespace is visible and control characters are harmless.
    """
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE, pad_edge=False)
    table.add_column("token", justify="right")
    table.add_column("text", overflow="fold")
    table.add_column("logprob", justify="right")
    table.add_column("%", justify="right")
    has_top = any(token.top for token in logprobs)
    if has_top:
        table.add_column("most likely, %", overflow="fold")
    for token in logprobs:
        row = [
            str(token.token_id),
            _text(token.token_id, tokenizer),
            f"{token.logprob:.3f}",
            _percent(token.logprob),
        ]
        if has_top:
            row.append("  ".join(f"{_text(i, tokenizer) or i} {_percent(value)}" for i, value in token.top))
        table.add_row(*map(Text, row))  # Text: square brackets are not markup
    return table


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Empty for a special token, and if there is no tokenizer."""
    text = "" if tokenizer is None else tokenizer.decode([token_id])
    return repr(text) if text else ""


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):.1f}"
