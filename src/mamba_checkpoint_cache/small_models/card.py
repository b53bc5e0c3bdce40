"""A trained small model as a folder: weights, tokenizer, and a card with what it was measured to do."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mamba_checkpoint_cache.small_models.recall import DEFAULT_PAIRS, recall_prompts
from mamba_checkpoint_cache.small_models.text import END_OF_TEXT, held_out_text

NUM_RECALL_PROMPTS = 100
NUM_WINDOWS, WINDOW_BYTES = 64, 1024
UNSEEN_SEED = 1_000_003

_CARD = """---
license: apache-2.0
library_name: transformers
tags: [{family}]
---
# {name}

A {classname} of {parameters:,} parameters that ships with mamba-checkpoint-cache, to measure what a compressed recurrent state
costs. It can do two things, and both lean on its recurrent states, since its one attention layer comes before them:

| task | measured |
|---|---|
| recall: {pairs} pairs of key and value told once, then asked for (`<a7B=c%>B=a7c%`) | {recall:.2%} right, of {asked:,} |
| text: the source code of Python's standard library | {bits:.3f} bits per byte on modules held out from training |

A token is a byte; token {end} ends a text. It writes no working code, and knows nothing else.

Trained from random weights in {minutes:.0f} minutes of one CPU core:

```sh
python -m mamba_checkpoint_cache.small_models.train {name} --out {name} --steps {steps} --seed {seed}
```

With torch {torch}, transformers {transformers} and Python {python}; the same versions on the same kind of CPU give the same
weights. Training data: the standard library of that Python (PSF licence), less one module in 16, and recall prompts that are
drawn at random.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """How a model came about; ``minutes`` of CPU time."""

    name: str
    steps: int
    seed: int
    minutes: float


def save(model: PreTrainedModel, run: Run, folder: Path) -> None:
    """Write ``model`` to ``folder`` with its tokenizer and its card, measured here."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    card = _CARD.format(
        name=run.name,
        family=run.name.partition("-")[0],
        classname=type(model).__name__,
        parameters=model.num_parameters(),
        pairs=DEFAULT_PAIRS,
        asked=DEFAULT_PAIRS * NUM_RECALL_PROMPTS,
        recall=recall_accuracy(model),
        bits=bits_per_byte(model),
        end=END_OF_TEXT,
        steps=run.steps,
        seed=run.seed,
        minutes=run.minutes,
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, whose id is the byte, and one more that ends a text."""
    vocabulary = {symbol: byte for byte, symbol in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",  # noqa: S106 - no password
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def recall_accuracy(model: PreTrainedModel) -> float:
    """The share of values that ``model`` gets right in fresh recall prompts, in one forward pass each."""
    right = total = 0
    for prompt in recall_prompts(NUM_RECALL_PROMPTS, seed=UNSEEN_SEED):
        ids = torch.tensor([list(prompt.prefix + prompt.asked)])
        guesses = model(input_ids=ids, use_cache=False).logits[0].argmax(-1)[len(prompt.prefix) :: 2]
        right += int((guesses == torch.tensor(list(prompt.asked[1::2]))).sum())
        total += len(prompt.queries)
    return right / total


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel) -> float:
    """Mean cross entropy over windows of text held out from training; the first byte of a window is given."""
    losses = []
    for seed in range(NUM_WINDOWS):
        ids = torch.tensor([list(held_out_text(WINDOW_BYTES, seed=seed))])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        losses.append(float(cross_entropy(logits[:-1], ids[0, 1:])))
    return sum(losses) / len(losses) / math.log(2)
