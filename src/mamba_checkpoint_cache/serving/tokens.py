"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mamba_checkpoint_cache.small_models.text import END_OF_TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokens(Protocol):
    """What the server needs of a tokenizer."""

    vocab_size: int
    eos_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``. Raises ``ValueError`` if it can't be encoded."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out; bytes that are no text become U+FFFD."""
        ...


class ByteTokens:
    """One token per byte of UTF-8, and one that ends a text: needs no files."""

    vocab_size = END_OF_TEXT + 1
    eos_ids = frozenset({END_OF_TEXT})

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``. Raises ``ValueError`` for lone surrogates."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return bytes(i for i in ids if i < END_OF_TEXT).decode(errors="replace")


class LibraryTokens:
    """A tokenizer of the transformers library."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, with whatever the model wants at its start."""
        text.encode()
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
