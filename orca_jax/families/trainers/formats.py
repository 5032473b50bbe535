"""The formats of checkpoints that `orca convert` writes, and the trainers' layouts among them."""

from typing import Literal, get_args

Layout = Literal["tunix", "maxtext", "maxtext-scanned", "gemma"]
Format = Literal["safetensors", "orbax", Layout]
FORMATS: tuple[Format, ...] = get_args(Format)
