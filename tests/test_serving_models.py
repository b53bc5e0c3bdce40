"""What is served: the random model, and models in folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mamba_checkpoint_cache.integrations.continuation import Mode
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.serving.models import RANDOM_MODEL, build_random_model, load_model
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import ByteTokens, LibraryTokens

TINY = {"head_dim": 8, "num_heads": 2, "hidden_size": 16, "layers": ("linear_attention", "full_attention")}


def test_the_default_model_is_random_and_needs_no_files() -> None:
    """Without a path there is a model all the same; it says that it was never trained."""
    loaded = load_model(None)

    assert (loaded.name, loaded.trained, type(loaded.tokens)) == (RANDOM_MODEL, False, ByteTokens)
    assert loaded.model.get_input_embeddings().weight.shape[0] == loaded.tokens.vocab_size


def test_the_random_model_is_always_the_same() -> None:
    """The seed decides the weights, and nothing around it: neither does building it disturb other draws."""
    torch.manual_seed(1)
    first = build_random_model(**TINY).state_dict()
    drawn = torch.rand(3)
    torch.manual_seed(1)

    again, other = build_random_model(**TINY).state_dict(), build_random_model(**TINY, seed=1).state_dict()

    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_its_heads_can_be_as_large_as_the_real_ones() -> None:
    """``head_dim`` 128 gives states of 128 by 128, in fp32."""
    spec = HybridModel(build_random_model(head_dim=128, num_heads=2, layers=("linear_attention", "full_attention"))).spec

    assert (spec.d_v, spec.d_k, spec.num_heads, spec.dtype) == (128, 128, 2, torch.float32)


def test_it_remembers() -> None:
    """The probe finds that its output depends on its state far beyond rounding, and continues it in chunks."""
    continuation = prepare_model(build_random_model(**TINY)).continuation

    assert (continuation.mode, continuation.bitwise) == (Mode.CHUNKS, True)
    assert "hardly moves" not in continuation.message


def test_a_folder_without_a_tokenizer_is_served_with_bytes(tmp_path: Path) -> None:
    """Weights survive the way through a folder, and a vocabulary of bytes needs no tokenizer."""
    model = build_random_model(**TINY, seed=3)
    model.save_pretrained(tmp_path / "tiny")

    loaded = load_model(str(tmp_path / "tiny"))

    assert (loaded.name, loaded.trained, loaded.max_context, type(loaded.tokens)) == ("tiny", True, 8192, ByteTokens)
    assert all(torch.equal(value, loaded.model.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_folder_with_a_tokenizer_is_served_with_it(tmp_path: Path) -> None:
    """The tokenizer beside the weights is used, and the end tokens of both count."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<end>": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path)
    model = build_random_model(**TINY, vocab_size=5)
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
    build_random_model(**TINY, vocab_size=99).save_pretrained(tmp_path / "words")

    for folder, words in (("none", "can't load a model"), ("words", "vocabulary of 257, but this model has 99")):
        with pytest.raises(OptionError, match=words) as raised:
            load_model(str(tmp_path / folder))
        assert "\n" not in str(raised.value)
