"""How to install what an extra of this package needs, in whatever way the package itself was installed."""

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires

_EXTRA = re.compile(r"""\bextra\s*==\s*["']([\w-]+)["']""")


def install_line(extra: str) -> str:
    """A pip command for the packages of an extra; it does not name this one, which no index has."""
    try:
        listed = [each.partition(";") for each in requires("orca_jax") or ()]
    except PackageNotFoundError:  # run from its files, without being installed
        listed = []
    needed = [shlex.quote(name.strip()) for name, _, marker in listed if extra in _EXTRA.findall(marker)]
    return f"pip install {' '.join(needed)}" if needed else f"pip install -e '.[{extra}]' -c constraints.txt"
