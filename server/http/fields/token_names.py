"""Names of tokens, as shown to clients with log-probabilities."""

from orca_jax.request.tokenizer import Tokenizer


class TokenNames:
    """The names of a model's tokens, cached. Without a tokenizer every name is `token_id:` and the number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._names: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def name(self, token_id: int) -> str:
        """The token's text; or `bytes:` and its bytes, as OpenAI writes them, if they are not valid UTF-8.

        A special token has its own name. Any other token is `token_id:7`.
        """
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._look_up(token_id)
        return name

    def byte_values(self, token_id: int) -> list[int] | None:
        """The bytes of the token's text; None if it has no text."""
        if token_id not in self._bytes:
            self._bytes[token_id] = list(self._data(token_id)) or None
        return self._bytes[token_id]

    def _look_up(self, token_id: int) -> str:
        data = self._data(token_id)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        special = None if self.tokenizer is None else self.tokenizer.token_name(token_id)
        return text or special or f"token_id:{token_id}"

    def _data(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
