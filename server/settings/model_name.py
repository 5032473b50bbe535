"""The name by which clients know a model that its operator gave none."""

import os.path
from pathlib import Path

DEMO = "demo"
_SNAPSHOTS, _CACHED = "snapshots", "models--"  # of the hub's cache: models--org--name/snapshots/COMMIT


def model_name(model: str | None) -> str:
    """The name of the model's directory; a name on the hub, a preset's or a function's is its own.

    A directory of the hub's cache has the name of its repository.
    """
    if model is None:
        return DEMO
    path = Path(model).expanduser()
    if not (model.startswith(("/", "~", ".")) or model.endswith("/") or path.is_dir()):
        return model
    path = Path(os.path.abspath(path))  # without following links, whose names were chosen
    if path.parent.name == _SNAPSHOTS and path.parents[1].name.startswith(_CACHED):
        return path.parents[1].name.removeprefix(_CACHED).replace("--", "/")
    return path.name or model
