# pyright: standard
"""Suggests which arrays of an Orbax checkpoint are a model's weights, by their shapes and names.

Each weight has slots, such as the three arrays of queries, keys and values. An array may fill a slot if some
order of its axes fits (array_form.py); words of its name make that more or less likely. Arrays and slots are
assigned so that the likelihood of all together is greatest. A slot that another assignment fills as well is
unsure, and so is an order of axes that sizes leave open; the user decides about both.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from orca_jax.checkpoint.orbax import open_chosen
from orca_jax.errors import ConfigError, UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import in_layers, layers_with, parameter_table
from orca_jax.families.strict_json import read_object, shown
from orca_jax.families.trainers.array_form import LAYERS, ArrayForm, axis_sizes
from orca_jax.families.trainers.array_trees import has_array_tree
from orca_jax.families.trainers.orca_json import ORCA_JSON, UNSURE, read_description
from orca_jax.model_files.locate import find_directory

Shape = tuple[int, ...]

_NOT_WEIGHTS = re.compile(
    r"\b(opt|optim|optimizer|mu|nu|momentum|ema|grads?|rngs?|step|count|schedule|dropout)\b"
)
_NEVER = -1e6  # the likelihood of an array that does not fit
_SAME = 1e-6
_MAX_JSON = 1_000_000

_NORM = r"norm|norms|ln|layernorm|rmsnorm|rms"
_ATTENTION, _FEED_FORWARD = r"attn|attention|mha", r"mlp|ff|ffn|ffw|feedforward|feed forward|moe|experts?"
_WORDS: Mapping[str, str] = {
    "q": r"q|wq|query|queries",
    "k": r"k|wk|key|keys",
    "v": r"v|wv|value|values",
    "kv": r"kv|wkv|key value",
    "qkv": r"qkv|wqkv|c attn|query key value",
    "out": r"o|wo|out|output|dense|c proj|vec",
    "gate": r"gate|gating|w1|wi 0",
    "up": r"up|w3|wi 1|wi|fc|fc1|fc 1|c fc|linear 1|intermediate|in",
    "gate and up": r"gate up|gating|wi",
    "down": r"down|w2|wo|fc2|fc 2|linear 2|c proj|out",
    "router": r"router|gate|gating",
    "token_embedding": r"tok|token|tokens|word|words|wte|embed|embedding|embeddings|embedder|vocab",
    "position_embedding": r"pos|position|positions|wpe",
    "head": r"head|lm|unembed|unembedding|output|logits",
    "final_norm": r"final|f|last|output|out",
    "q_norm": r"q|query",
    "k_norm": r"k|key",
    "attn_norm": rf"(?:pre )?(?:self )?(?:{_ATTENTION})|input|1",
    "mlp_norm": rf"(?:pre )?(?:{_FEED_FORWARD})|post (?:self )?(?:{_ATTENTION})|2",
    "attn_out_norm": rf"post (?:self )?(?:{_ATTENTION})",
    "mlp_out_norm": rf"post (?:{_FEED_FORWARD})",
}
_SCALES, _BIASES = r"scale|scales|weight|kernel|gamma|g|w", r"bias|biases|beta|b"


@dataclass(frozen=True, slots=True)
class _Slot:
    """An array that a weight needs: `units` are its axes, input before output; `n_parts` weights share it."""

    parameter: str  # with {i} in place of the layer
    label: str
    units: tuple[str, ...]
    n_parts: int = 1


@dataclass(frozen=True, slots=True)
class _Found:
    """An array, or with {i} in its name the equal arrays of these layers."""

    name: str
    shape: Shape
    layers: tuple[int, ...] = ()


@dataclass(slots=True)
class SuggestedNames:
    """A map for `orca convert --map`: `values` are those of an orca.json, whose `unsure` is to be emptied."""

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def unsure(self) -> dict[str, Any]:
        """The user's decisions, by entry."""
        return self.values.get(UNSURE, {})

    def write(self, path: Path) -> None:
        """Write the map to a new file. Raises ConfigError."""
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self.values, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"{shown(path)} cannot be written: {error.strerror}") from error


def suggest_names(source: str | Path) -> SuggestedNames:
    """Suggest the names of a model's weights in an Orbax checkpoint, which lacks nothing but these.

    Its directory has a config.json, or an orca.json with the model. Reads no weights. Raises ConfigError for
    another kind of checkpoint, or a CheckpointError.
    """
    directory = find_directory(source)
    if not has_array_tree(directory):
        raise ConfigError(f"{shown(directory)} is no Orbax checkpoint; the names of others are known")
    description = read_description(directory)
    opened = open_chosen(description.checkpoint, lambda names: names)
    shapes = {name: tuple(store.shape) for name, store in opened.items()}
    found = match_names(description.model, shapes)
    values: dict[str, Any] = {}
    if (directory / ORCA_JSON).exists():
        given = read_object(directory / ORCA_JSON, _MAX_JSON)
        values = {key: given[key] for key in ("model", "rotary") if key in given}
    if description.checkpoint != directory:
        values["checkpoint"] = description.checkpoint.relative_to(directory).as_posix()
    return replace(found, values=values | found.values)


def match_names(model: ModelConfig, shapes: Mapping[str, Shape]) -> SuggestedNames:
    """Suggest the names of a model's weights among arrays of these shapes. Raises UnsupportedModel."""
    if model.encoder is not None or model.only_pools:
        raise UnsupportedModel("names are suggested for decoders alone")
    others = [name for name in shapes if _NOT_WEIGHTS.search(_words(name))]
    found = _by_layer({name: shape for name, shape in shapes.items() if name not in {*others}}, model)
    layers_of = dict[str, list[int]]()
    for name in parameter_table(model):
        pattern, layer = in_layers(name)
        layers_of.setdefault(pattern, []).extend([int(layer)] if layer else [])
    unsure = dict[str, Any]()
    slots = list[_Slot]()
    for pattern in layers_of:
        options = _options(pattern, model)
        if not options:
            unsure[pattern] = "write this entry by hand (docs/checkpoints.md)"
            continue
        slots += max(options, key=lambda option: _promise(option, found, model, layers_of[pattern]))
    matching = _Matching(model, slots, found, layers_of)
    names = matching.entries(unsure)
    used = {one.name for one in matching.chosen.values()}
    left = [one.name for one in found if one.name not in used]
    ignore = sorted({*map(_pattern_of, others), *(name.replace("{i}", "*") for name in left)})
    if left:
        unsure["ignore"] = sorted(left)
    values: dict[str, Any] = {"names": names}
    if ignore:
        values["ignore"] = ignore
    if unsure:
        values[UNSURE] = unsure
    notes = []
    if model.layers[0].rotary is not None:
        notes.append(
            "the order of rotary pairs cannot be seen: halves of a head are assumed; if the two elements of "
            'a pair are neighbours, add "permute_rope": true to queries and keys'
        )
    if model.layers[0].norm.unit_offset:
        notes.append(
            "norms are assumed to be stored as w of 1 + w, as the model has them; if the checkpoint has "
            '1 + w, add "add": -1 to them'
        )
    return SuggestedNames(values, notes)


def _pattern_of(name: str) -> str:
    """The pattern of an array that is no weight: everything below the first word that says so."""
    for end in re.finditer(r"[./]", name):
        if _NOT_WEIGHTS.search(_words(name[: end.start()])):
            return f"{name[: end.end()]}*"
    return name


def _words(name: str) -> str:
    """The words of a name in lower case, with spaces between: `h/3/wi_0.kernel` is "h 3 wi 0 kernel"."""
    name = re.sub(r"([a-z])([A-Z])", r"\1 \2", name.removesuffix(".value"))
    return " ".join(re.findall(r"[a-z]+\d*(?![a-z])|[a-z]+|\d+", name.lower()))


def _by_layer(shapes: Mapping[str, Shape], model: ModelConfig) -> list[_Found]:
    """The arrays, with those that differ in the layer's number alone as one."""
    groups = dict[tuple[str, str], dict[int, str]]()
    for name in shapes:
        for number in re.finditer(r"\d+", name):
            if str(int(number[0])) == number[0] and int(number[0]) < model.n_layers:
                place = name[: number.start()], name[number.end() :]
                groups.setdefault(place, {})[int(number[0])] = name
    before = dict[str, list[tuple[str, str]]]()
    for place, members in groups.items():
        if len({shapes[name] for name in members.values()}) == 1:
            before.setdefault(place[0], []).append(place)
    # The number of a layer is before most of what layers have; that of `wi_0` is not.
    in_layers_of_ours = {pattern for pattern in map(in_layers, parameter_table(model)) if pattern[1] == "0"}
    counts = {
        start: sum(len(groups[place]) for place in places)
        for start, places in before.items()
        if {i for place in places for i in groups[place]} == {*range(model.n_layers)}
        and 2 * len(places) >= len(in_layers_of_ours)
    }
    found, grouped = list[_Found](), set[str]()
    if counts:
        for start, end in before[max(counts, key=lambda start: (counts[start], -len(start)))]:
            members = groups[start, end]
            grouped |= {*members.values()}
            shape = shapes[next(iter(members.values()))]
            found.append(_Found(f"{start}{{i}}{end}", shape, tuple(sorted(members))))
    return found + [_Found(name, shape) for name, shape in shapes.items() if name not in grouped]


def _options(pattern: str, model: ModelConfig) -> list[list[_Slot]]:
    """The sets of arrays, any of which may have the weight; none if it is unknown here."""
    table = {in_layers(name)[0]: name for name in parameter_table(model)}
    parameter = parameter_table(model)[table[pattern]]
    end = pattern.removeprefix("layers.{i}.")

    def one(label: str, *units: str) -> list[list[_Slot]]:
        return [[_Slot(pattern, label, units)]]

    width = "H" if model.embedding.size == model.hidden_size else "E"
    part, _, kind = end.rpartition(".")
    if end in ("token_embedding", "position_embedding"):
        return one(end, "V", width) if end == "token_embedding" else one(end, "P", "H")
    if end == "head.weight":
        return one("head", width, "V")
    if end in ("qkv.weight", "qkv.bias") and parameter.axes[0] == "G+2":
        into = ("H",) if kind == "weight" else ()
        each = [
            _Slot(pattern, label, (*into, unit)) for label, unit in (("q", "N D"), ("k", "K D"), ("v", "K D"))
        ]
        both = _Slot(pattern, "kv", (*into, "K D"), 2)
        every = [[*each], [each[0], both]]
        if model.n_heads == model.n_kv_heads:
            every.append([_Slot(pattern, "qkv", (*into, "N D"), 3)])
        return every
    if end == "out.weight":
        return one("out", "N D", "H")
    axes = "".join(parameter.axes)
    if end in ("up.weight", "up.bias", "experts.up.weight"):
        leading = ("X",) if end.startswith("experts") else ()
        units = (*leading, *(("H",) if kind == "weight" else ()), "F")
        if "2" not in parameter.axes:
            return one("up", *units)
        pair = [_Slot(pattern, "gate", units), _Slot(pattern, "up", units)]
        return [pair, [_Slot(pattern, "gate and up", units, 2)]]
    if end in ("down.weight", "experts.down.weight"):
        return one("down", *(("X",) if end.startswith("experts") else ()), "F", "H")
    if end == "router.weight":
        return one("router", "H", "X")
    if len(parameter.axes) == 1 and axes in ("H", "D", "F", "V"):
        return one(part, axes)
    return []


def _orders(slot: _Slot, *, stacked: bool) -> Iterator[str]:
    """All orders of a slot's axes, those that are most usual first."""

    def spelled(units: Sequence[str]) -> Iterator[list[str]]:
        if not units:
            yield []
            return
        for rest in spelled(units[1:]):
            if " " in units[0]:
                yield [*units[0].split(), *rest]
                yield [units[0].replace(" ", ""), *rest]
            else:
                yield [units[0], *rest]

    seen = set[str]()
    counting = [LAYERS] * stacked + [str(slot.n_parts)] * (slot.n_parts > 1)
    for axes in spelled(slot.units):
        for order in permutations([*counting, *axes]):
            heads = [letter for letter in order if letter in {"N", "K", "D"}]
            text = " ".join(order)
            if text in seen or heads not in ([], ["D"], ["N", "D"], ["K", "D"]):
                continue
            seen.add(text)
            yield text


def _score(slot: _Slot, one: _Found, sizes: Mapping[str, int]) -> float:
    """Rate how likely the array's name makes it; above 0 if a word says so."""
    words = _words(one.name.replace("{i}", " "))

    def has(pattern: str) -> bool:
        return re.search(rf"\b(?:{pattern})\b", words) is not None

    kind = slot.parameter.rpartition(".")[2]
    is_norm = slot.label.endswith("norm")
    score = 2.0 * has(_WORDS.get(slot.label, slot.label))
    mine, other = (_BIASES, _SCALES) if kind == "bias" else (_SCALES, _BIASES)
    score += 1 if has(mine) else -2 * has(other)
    score += (1 if is_norm else -3) * has(_NORM)
    if is_norm and slot.label not in ("q_norm", "k_norm") and "post" in words.split():
        # After attention may be before the feed-forward part, if there is no norm of results.
        score += 1.5 if slot.label.endswith("out_norm") or slot.label == "mlp_norm" else -1.5
    if slot.label in ("q", "k", "v", "kv", "qkv", "out"):
        score += has(_ATTENTION) - 2 * has(_FEED_FORWARD)
    if slot.label in ("gate", "up", "down", "gate and up"):
        score += has(_FEED_FORWARD) - 2 * has(_ATTENTION)
    if slot.label in ("token_embedding", "head") and sizes["V"] in one.shape:
        score += 0.5  # rather than a longer table
    return score


def _fits(slot: _Slot, one: _Found, model: ModelConfig, layers: Sequence[int]) -> list[str]:
    """The orders of axes in which the array may be the slot's."""
    in_a_layer = "{i}" in slot.parameter
    if one.layers and (not in_a_layer or [*one.layers] != [*layers]):
        return []
    stacked = in_a_layer and not one.layers
    sizes = axis_sizes(model, slot.parameter.replace("{i}", str(layers[0] if layers else 0)))
    n_layers = len(layers_with(model, slot.parameter)) if stacked else 0
    return [
        axes
        for axes in _orders(slot, stacked=stacked)
        if ArrayForm(axes, n_layers=n_layers).fits(one.shape, sizes)
    ]


def _promise(
    option: Sequence[_Slot], found: Sequence[_Found], model: ModelConfig, layers: Sequence[int]
) -> tuple[bool, float, int]:
    """Rate an option: whether there are arrays for it, their names, and their number."""
    sizes = axis_sizes(model, option[0].parameter.replace("{i}", str(layers[0] if layers else 0)))
    best = [
        max((_score(slot, one, sizes) for one in found if _fits(slot, one, model, layers)), default=_NEVER)
        for slot in option
    ]
    return min(best) > _NEVER, sum(best) / len(best), len(option)


class _Matching:
    """The assignment of arrays to slots."""

    def __init__(
        self,
        model: ModelConfig,
        slots: Sequence[_Slot],
        found: Sequence[_Found],
        layers_of: Mapping[str, Sequence[int]],
    ) -> None:
        self._slots, self._found = slots, found
        self._fits = [[_fits(slot, one, model, layers_of[slot.parameter]) for one in found] for slot in slots]
        self._scores = np.full((len(slots), len(found)), _NEVER)
        for i, slot in enumerate(slots):
            layers = layers_of[slot.parameter]
            sizes = axis_sizes(model, slot.parameter.replace("{i}", str(layers[0] if layers else 0)))
            for j, one in enumerate(found):
                if self._fits[i][j]:
                    self._scores[i, j] = _score(slot, one, sizes)
        self._best, self._total = self._assigned(self._scores)
        # Matrices are stored [in, out] or [out, in], all in the same way, if that suffices for all of them.
        ways = [self._turned(into_first=into_first) for into_first in (True, False)]
        whole = [way for way in ways if self._assigned(way[1])[1] >= self._total - _SAME]
        if len(whole) == 1:
            self._fits, self._scores = whole[0]
            self._best, self._total = self._assigned(self._scores)
        self.chosen = {i: found[j] for i, j in self._best.items()}

    @staticmethod
    def _assigned(scores: np.ndarray) -> tuple[dict[int, int], float]:
        rows, columns = linear_sum_assignment(scores, maximize=True)
        pairs = {int(i): int(j) for i, j in zip(rows, columns, strict=True) if scores[i, j] > _NEVER / 2}
        return pairs, float(scores[rows, columns].sum())

    def _others(self, i: int) -> list[str]:
        """The arrays that may as well fill slot `i`."""
        scores, others = self._scores.copy(), list[str]()
        scores[i, self._best[i]] = _NEVER
        while True:
            pairs, total = self._assigned(scores)
            if i not in pairs or total < self._total - _SAME:
                return others
            others.append(self._found[pairs[i]].name)
            scores[i, pairs[i]] = _NEVER

    def _turned(self, *, into_first: bool) -> tuple[list[list[list[str]]], np.ndarray]:
        """The orders of axes in which matrices are stored one way, and the likelihoods that are left."""
        fits, scores = [[[*one] for one in row] for row in self._fits], self._scores.copy()
        for i, slot in enumerate(self._slots):
            if len(_axes_of(slot)) == 2:
                for j, orders in enumerate(fits[i]):
                    orders[:] = [axes for axes in orders if _is_into_first(slot, axes) == into_first]
                    if not orders:
                        scores[i, j] = _NEVER
        return fits, scores

    def entries(self, unsure: dict[str, Any]) -> dict[str, Any]:
        """The entries of `names`; what is not certain is added to `unsure`."""
        names, parts = dict[str, Any](), dict[str, list[dict[str, Any]]]()
        for i, slot in enumerate(self._slots):
            if i not in self._best:
                unsure[slot.parameter] = f"no array found for {slot.label}"
                continue
            name, axes = self.chosen[i].name, self._axes(i, unsure)
            others = self._others(i)
            if others:
                unsure.setdefault(slot.parameter, {})[slot.label] = [name, *others]
            for part in range(slot.n_parts):
                entry: dict[str, Any] = {"name": name, "axes": axes}
                parts.setdefault(slot.parameter, []).append(
                    entry | {"part": part} if slot.n_parts > 1 else entry
                )
        for parameter, listed in parts.items():
            names[parameter] = listed[0] if len(listed) == 1 else {"name": listed}
            if parameter.endswith("out.weight"):
                names[parameter]["heads"] = "queries"
        return names

    def _axes(self, i: int, unsure: dict[str, Any]) -> str:
        """The order of the axes of slot `i`."""
        slot, fits = self._slots[i], self._fits[i][self._best[i]]
        # Layers and parts come first unless sizes say otherwise.
        counting = {str(slot.n_parts), LAYERS}
        first = [axes for axes in fits if not any(each in counting for each in _after_others(axes, counting))]
        fits = first or fits
        if len(fits) > 1:
            unsure.setdefault(slot.parameter, {})[f"{slot.label}, axes"] = fits
        return fits[0]


def _axes_of(slot: _Slot) -> tuple[str, ...]:
    """The units of a matrix that has an orientation: [input, output]; () for others."""
    units = tuple(unit for unit in slot.units if unit != "X" or slot.label == "router")
    return units if len(units) == 2 and slot.label not in ("token_embedding", "position_embedding") else ()


def _is_into_first(slot: _Slot, axes: str) -> bool:
    into, out = (unit.split()[-1] for unit in _axes_of(slot))
    place = {letter: k for k, axis in enumerate(axes.split()) for letter in axis}
    return place[into] < place[out]


def _after_others(axes: str, counting: Collection[str]) -> list[str]:
    """The counting axes that come after others."""
    letters = axes.split()
    first = next((k for k, letter in enumerate(letters) if letter not in counting), len(letters))
    return [letter for letter in letters[first:] if letter in counting]
