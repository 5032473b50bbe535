"""The buffer that the host makes for a program: the flat batch, then attention's words.

In the last stage's last layer only each row's last token attends, so the words of the other layers are
followed by words for that layer. A bucket with one token for each row needs none: its layers are all alike.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.execution.attention_paths import AttentionPath
from orca_jax.iteration.flat_batch import FlatArrays, FlatBatch, FlatLayout, aligned
from orca_jax.model.context import Attend


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """The layout of a program's buffer; with `last` the last layer attends from last tokens alone."""

    path: AttentionPath
    last: bool

    def size(self, layout: FlatLayout) -> int:
        """Number of 32-bit words in an iteration's buffer."""
        last = self._last_tokens(layout)
        return self._first(layout) + (0 if last is None else self.path.n_words(last))

    def fill(self, flat: FlatBatch) -> npt.NDArray[np.int32]:
        """An iteration's buffer, [size] int32."""
        layout, last = flat.layout, self._last_tokens(flat.layout)
        if not self.path.n_words(layout):
            return flat.buffer
        words = [flat.buffer, self.path.words(layout, flat.arrays)]
        if last is not None:
            words.append(np.zeros(self._first(layout) - sum(map(len, words)), np.int32))
            row_start = np.minimum(np.arange(last.n_rows + 1, dtype=np.int32), flat.n_rows)
            words.append(self.path.words(last, flat.arrays._replace(row_start=row_start)))
        return np.concatenate(words)

    def bind(self, layout: FlatLayout, batch: FlatArrays, buffer: jax.Array) -> Attend:
        """Attention of all tokens; `batch` and `buffer` are traced."""
        end = layout.size + self.path.n_words(layout)
        return self.path.bind(layout, batch, buffer[layout.size : end])

    def bind_last(
        self, layout: FlatLayout, batch: FlatArrays, buffer: jax.Array
    ) -> tuple[Attend, jax.Array] | None:
        """Attention of each row's last token, and the number of rows [1] int32; None if all layers are alike.

        As in decode, each row is one query, which attends to all of the row's keys.
        """
        last = self._last_tokens(layout)
        if last is None:
            return None
        row_start = _one_each(last, batch)
        words = buffer[self._first(layout) :]
        return self.path.bind(
            last, batch._replace(row_start=row_start, positions=batch.kv_length - 1), words
        ), row_start[-1:]

    def bind_cross(self, layout: FlatLayout, batch: FlatArrays) -> Attend | None:
        """Cross attention of all tokens to their row's encoder output; None without an encoder."""
        if not layout.max_encoder_blocks:
            return None
        return self._cross(layout, batch)

    def bind_last_cross(self, layout: FlatLayout, batch: FlatArrays) -> Attend | None:
        """Cross attention of each row's last token; `layout` and `batch` are those of all tokens."""
        last = self._last_tokens(layout)
        if last is None or not layout.max_encoder_blocks:
            return None
        return self._cross(last, batch._replace(row_start=_one_each(last, batch)))

    def _cross(self, layout: FlatLayout, batch: FlatArrays) -> Attend:
        layout = replace(layout, max_blocks=layout.max_encoder_blocks, max_encoder_blocks=0)
        assert not self.path.n_words(layout), "no path with work for the host knows cross attention"
        encoded = batch._replace(kv_length=batch.encoder_length, block_table=batch.encoder_table)
        return self.path.bind(layout, encoded, jnp.zeros(0, jnp.int32))

    def _last_tokens(self, layout: FlatLayout) -> FlatLayout | None:
        return layout.last_tokens if self.last else None

    def _first(self, layout: FlatLayout) -> int:
        """Index of the last layer's first word."""
        n_words = layout.size + self.path.n_words(layout)
        return n_words if self._last_tokens(layout) is None else aligned(n_words)


def _one_each(last: FlatLayout, batch: FlatArrays) -> jax.Array:
    """`row_start` [R + 1] of a batch of each row's last token."""
    n_rows = (batch.kv_length > 0).sum(dtype=jnp.int32)  # without padding
    return jnp.minimum(jnp.arange(last.n_rows + 1, dtype=jnp.int32), n_rows)
