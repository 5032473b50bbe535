"""The forms in which a checkpoint stores one of our weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredName:
    """What a weight is called in a checkpoint.

    `names`: one tensor, or several that lie one above the other along the weight's first axis; "{i}" stands
    for the layer's number. `transpose`: each is stored [in, out]. `reshape`: it has more axes, of which
    neighbours are taken as one.
    """

    names: tuple[str, ...]
    transpose: bool = False
    reshape: bool = False

    def in_layer(self, layer: str, prefix: str = "") -> "StoredName":
        """The names with the number of a layer for "{i}" and `prefix` for "{prefix}"."""
        names = tuple(name.replace("{i}", layer).replace("{prefix}", prefix) for name in self.names)
        return StoredName(names, self.transpose, self.reshape)


def as_it_is(name: str) -> StoredName:
    """One tensor of our shape."""
    return StoredName((name,))


def transposed(name: str) -> StoredName:
    """One matrix, stored [in, out]."""
    return StoredName((name,), transpose=True)


def stacked(*names: str) -> StoredName:
    """Several tensors, each some rows of ours."""
    return StoredName(names)
