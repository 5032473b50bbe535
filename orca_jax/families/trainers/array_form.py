"""The form of one of our weights in an array of a trainer's checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, attention_sizes, in_layers, layers_with

LAYERS = "L"
EXPERTS = "X"
LETTERS = "LVPHENKGDFXSQWMACR"
_ORDER = "XVPNKGDQWMACRSFEH"  # of axes that merge into one axis of our weight: heads before their elements


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """The meaning of an array's axes: a letter for each in the array's order, with spaces between ("H N D").

    The letters are those of parameters.py, with N for query heads, G for those of one K/V head ("K G" for
    all), L for layers of one kind, X for experts in a router too, and R for the L of latent attention.
    Letters without a space between are one axis of the array. A number is an axis of so many parts. Our
    weight is at `layer` of the `n_layers` along L, and at `part` of the parts. Several orders are
    separated by |: an array is read in the first order that its shape fits, and written in the first of
    all.

    With `interleaved`, elements of a head that rotary positions turn together are neighbours; ours are half a
    head apart. Our values are the stored ones times `multiply`, plus `add`.
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
        """Choose the first order of axes that the shape fits; if none fits, the first of all."""
        forms = [replace(self, axes=axes.strip()) for axes in self.axes.split("|")]
        return next((form for form in forms if form.fits(shape, sizes)), forms[0])

    def fits(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        """Whether the weight can be in an array of this shape, whose vocabulary may be padded."""
        expected = self.shape(sizes)
        return len(shape) == len(expected) and all(
            found == size or (letter == "V" and found > size)
            for letter, found, size in zip(self.letters, shape, expected, strict=True)
        )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The array's shape, of `axis_sizes`."""
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
        """The index of our weight in the array."""
        return tuple(
            self.part if letter.isdigit() else self.layer if letter == LAYERS else slice(None)
            for letter in self.letters
        )

    def rows_and_columns(self, parameter: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split the array's axes into those of our weight's rows and those of its columns."""
        last = set(parameter.axes[-1])
        if "K" in last:
            last |= {"N", "G"}
        if "E" in last:
            last.add("H")
        is_matrix = len(parameter.stacked_shape) == 2
        found = [(letter[0], i) for i, letter in enumerate(self.letters) if letter[0] in _ORDER]
        found.sort(key=lambda pair: _ORDER.index(pair[0]))
        columns = tuple(i for letter, i in found if is_matrix and letter in last)
        return tuple(i for _, i in found if i not in columns), columns


def axis_sizes(model: ModelConfig, name: str) -> dict[str, int]:
    """The size of each letter but L in the array of the weight `name`; 0 if the model has none."""
    attention = model.attention
    feed_forward = layers_with(model, name)[int(in_layers(name)[1] or 0)].feed_forward
    experts = feed_forward.experts if feed_forward else None
    sizes = attention_sizes(attention)
    n_kv_heads = attention.n_kv_heads // attention.kv_repeats
    return {
        **{letter: sizes.get(letter, 0) for letter in "QWMAC"},
        "R": sizes.get("L", 0),
        "V": model.vocab_size,
        "P": model.n_positions + (model.positions.offset if model.positions else 0),
        "H": model.hidden_size,
        "E": model.embedding.size,
        "N": attention.n_heads,
        "K": n_kv_heads,
        "G": attention.n_heads // n_kv_heads,
        "D": attention.head_size,
        "F": feed_forward.size if feed_forward else 0,
        "X": experts.number if experts else 0,
        "S": (experts.shared_size or 0) if experts else 0,
    }
