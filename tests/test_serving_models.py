"""What is served: models in folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mamba_checkpoint_cache.serving.models import load_model
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import ByteTokens, LibraryTokens
from mamba_checkpoint_cache.small_models.architectures import build_gdn_hybrid

TINY = {"head_dim": 8, "num_heads": 2, "hidden_size": 16, "layers": ("linear_attention", "full_attention")}


def test_a_folder_without_a_tokenizer_is_served_with_bytes(tmp_path: Path) -> None:
    """Weights survive the way through a folder, and a vocabulary of bytes needs no tokenizer."""
    model = build_gdn_hybrid(**TINY, seed=3)
    model.save_pretrained(tmp_path / "tiny")

    loaded = load_model(str(tmp_path / "tiny"))

    assert (loaded.name, loaded.max_context, type(loaded.tokens)) == ("tiny", 8192, ByteTokens)
    assert all(torch.equal(value, loaded.model.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_folder_with_a_tokenizer_is_served_with_it(tmp_path: Path) -> None:
    """The tokenizer beside the weights is used, and the end tokens of both count."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<end>": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path)
    model = build_gdn_hybrid(**TINY, vocab_size=5)
    model.generation_config.eos_token_id = [3, 4]
    model.save_pretrained(tmp_path)

    tokens = load_model(str(tmp_path)).tokens

    assert isinstance(tokens, LibraryTokens)
    assert (tokens.encode("abba"), tokens.decode([2, 1, 0, 3])) == ([2, 1, 0], "abba")
    assert (tokens.vocab_size, tokens.eos_ids) == (5, {3, 4})
    with pytest.raises(ValueError, match="surrogates"):
        tokens.encode("\ud800")


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path) -> None:
    """An empty folder, and a vocabulary that bytes don't fit, are the caller's mistakes."""
    build_gdn_hybrid(**TINY, vocab_size=99).save_pretrained(tmp_path / "words")

    for folder, words in (("none", "can't load a model"), ("words", "vocabulary of 257, but this model has 99")):
        with pytest.raises(OptionError, match=words) as raised:
            load_model(str(tmp_path / folder))
        assert "\n" not in str(raised.value)
