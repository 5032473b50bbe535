"""The form in which an array of a trainer's checkpoint holds one of our weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orca_jax.families.attention_matrices import latent_sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, in_layers, layers_with

LAYERS = "L"
EXPERTS = "X"
LETTERS = "LVPHENKDFXSQWMACR"
_ORDER = "XVPNKDQWMACRSFEH"  # of the axes that are one axis of our weight: heads before their elements


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """`axes` has a letter for each axis of the array, in its order, with spaces between: "H N D".

    The letters are those of parameters.py, N query heads, L layers of one kind, X experts also for a router,
    and R the rank of compressed keys and values with what is rotated. Letters without a space between are
    axes that the array has as one, a number is the size of an axis of that many parts. Our weight
    is at `layer` of the `n_layers` along L, and at `part` of the parts.
    Where the same weight is saved in several orders they stand one after the other, with | between: the first
    that fits the array is meant, and the first of all is written.

    `interleaved`: the elements of a head that rotary positions turn together are neighbours; ours are half a
    head apart. Our values are `multiply` times the stored ones, plus `add`.
    """

    axes: str
    layer: int = 0
    n_layers: int = 0
    part: int = 0
    interleaved: bool = False
    multiply: float = 1.0
    add: float = 0.0

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(self.axes.partition("|")[0].split())

    def fitting(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> "ArrayForm":
        """This form with the order of axes that an array of this shape has; with the first if none fits."""
        forms = [replace(self, axes=axes.strip()) for axes in self.axes.split("|")]
        return next((form for form in forms if form.fits(shape, sizes)), forms[0])

    def fits(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        """Whether an array of this shape holds the weight. Its vocabulary may be padded."""
        expected = self.shape(sizes)
        return len(shape) == len(expected) and all(
            found == size or (letter == "V" and found > size)
            for letter, found, size in zip(self.letters, shape, expected, strict=True)
        )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The array's shape; `sizes` as from `axis_sizes`."""
        return tuple(
            int(letter)
            if letter.isdigit()
            else self.n_layers
            if letter == LAYERS
            else math.prod(sizes[each] for each in letter)
            for letter in self.letters
        )

    @property
    def index(self) -> tuple[int | slice, ...]:
        """Where in the array our weight is."""
        return tuple(
            self.part if letter.isdigit() else self.layer if letter == LAYERS else slice(None)
            for letter in self.letters
        )

    def rows_and_columns(self, parameter: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The array's axes that are the rows of our weight, and those that are its columns."""
        last = set(parameter.axes[-1])
        if "K" in last:
            last.add("N")
        if "E" in last:
            last.add("H")
        is_matrix = len(parameter.stacked_shape) == 2
        found = [(letter[0], i) for i, letter in enumerate(self.letters) if letter[0] in _ORDER]
        found.sort(key=lambda pair: _ORDER.index(pair[0]))
        columns = tuple(i for letter, i in found if is_matrix and letter in last)
        return tuple(i for _, i in found if i not in columns), columns


def axis_sizes(model: ModelConfig, name: str) -> dict[str, int]:
    """The size of each letter but L in a checkpoint of `model`, for the weight `name`; 0 if it has none."""
    attention = model.attention
    feed_forward = layers_with(model, name)[int(in_layers(name)[1] or 0)].feed_forward
    experts = feed_forward.experts
    latent = latent_sizes(attention)
    return {
        **{letter: latent.get(letter, 0) for letter in "QWMAC"},
        "R": latent.get("L", 0),
        "V": model.vocab_size,
        "P": model.n_positions + (model.positions.offset if model.positions else 0),
        "H": model.hidden_size,
        "E": model.embedding.size,
        "N": attention.n_heads,
        "K": attention.n_kv_heads // attention.kv_repeats,
        "D": attention.head_size,
        "F": feed_forward.size,
        "X": experts.number if experts else 0,
        "S": (experts.shared_size or 0) if experts else 0,
    }
