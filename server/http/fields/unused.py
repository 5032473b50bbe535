"""`x-orca-ignored`: the response header that names the fields of a request that were taken and not used."""

from orca_jax.errors import NotSupported

HEADER = "x-orca-ignored"
MOST_CHARACTERS = 1024  # of the header; proxies limit the size of all headers together


class Unused:
    """Names of fields that a request has and this server does not use, each once.

    A name is a dotted path without the positions in lists, `messages.content.cache_control`, made of names in
    this server's tables alone. So there are few of them, and none needs escaping in a header. With `refuse`,
    which is `--strict`, such a field is an error instead.
    """

    def __init__(self, *, refuse: bool = False) -> None:
        self._refuse = refuse
        self._names: dict[str, None] = {}

    def note(self, name: str, reason: str, *, param: str | None = None) -> None:
        """Note a field. `param` is its path with positions, if it has any.

        Raises NotSupported with `--strict`.
        """
        if self._refuse:
            param = param or name
            message = f"{param} is not used: {reason}; leave it out, because this server runs with --strict"
            raise NotSupported(message, param=param)
        self._names[name] = None

    def header(self) -> str:
        """The header's value, empty if all fields were used; it ends with "..." where names are left out."""
        shown = list[str]()
        n = 0
        for name in self._names:
            n += len(name) + 2
            if n > MOST_CHARACTERS - 3:
                shown.append("...")
                break
            shown.append(name)
        return ", ".join(shown)
