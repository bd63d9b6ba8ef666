"""Text to token ids."""

from __future__ import annotations

from array import array

from tokenizers import Tokenizer


class Encoder:
    """One tokenizer. `encode` may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int = 0) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool, scope: str = "") -> array[int]:
        """Ids of the tokens of a text. Raises ValueError for text that is no Unicode (lone surrogates).

        scope: whose cached pieces may be used; nobody can tell from the time what others have asked.
        """
        try:
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeError, TypeError) as error:
            raise ValueError(f"not text: {error!s:.100}") from None
        return array("I", encoding.ids)
