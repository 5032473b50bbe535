"""What tokens are called, where a client is told of them."""

from orca_jax.request.tokenizer import Tokenizer


class TokenNames:
    """The names of a model's tokens, kept once they are known; without a tokenizer they are numbers alone."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._names: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def name(self, token_id: int) -> str:
        """Its text, or as OpenAI writes them its bytes where they are no text by themselves; a special
        token's own name; `token_id:7` where there is nothing of these.
        """
        known = self._names.get(token_id)
        if known is None:
            known = self._names[token_id] = self._look_up(token_id)
        return known

    def byte_values(self, token_id: int) -> list[int] | None:
        """The bytes of text that it stands for; None where it stands for none."""
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
