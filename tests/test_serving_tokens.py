"""Byte tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_checkpoint_cache.serving.tokens import END_OF_TEXT, ByteTokens


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(text: str) -> None:
    """Encoding and decoding gives the same text, with or without an end token, in ids within the vocabulary."""
    tokens = ByteTokens()

    ids = tokens.encode(text)

    assert tokens.decode([*ids, END_OF_TEXT]) == text
    assert all(0 <= i < END_OF_TEXT for i in ids)


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    """Any ids can be decoded."""
    assert ByteTokens().decode([104, 255, 105]) == "h\ufffdi"


def test_lone_surrogates_are_refused() -> None:
    """Text that has no UTF-8 is the caller's mistake."""
    with pytest.raises(ValueError, match="surrogates"):
        ByteTokens().encode("\ud800")
