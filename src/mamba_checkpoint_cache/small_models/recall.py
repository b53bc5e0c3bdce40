"""The recall task: pairs of a key and a value are read once, and the values are asked for later, key by key."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

KEYS = string.ascii_letters.encode()
VALUES = string.digits.encode() + b"!#$%&*+-/=?@^_~|.,;:()"
OPEN, CLOSE = b"<", b">"
DEFAULT_PAIRS = 32


@dataclass(frozen=True, slots=True)
class RecallPrompt:
    """``prefix`` states every pair once, ``queries`` asks for each, once a round: its key, and the value that is right.

    As text: ``<a7B=c%>B=a7c%``, where the model reads up to a key and is to predict the value; one byte is one token.
    """

    prefix: bytes
    queries: tuple[tuple[bytes, bytes], ...]

    @property
    def asked(self) -> bytes:
        """Keys and right answers in the order asked, as they follow ``prefix``; a key stands at each even offset."""
        return b"".join(key + value for key, value in self.queries)


def recall_prompts(count: int, *, pairs: int = DEFAULT_PAIRS, rounds: int = 1, seed: int = 0) -> list[RecallPrompt]:
    """The same prompts for the same arguments. Keys are distinct within a prompt; a guess is right once in 32.

    Every key is asked for in each of ``rounds``, in another order.

    Raises:
        ValueError: unless 1 <= pairs <= 52, the number of keys, and 1 <= rounds.
    """
    if not 1 <= pairs <= len(KEYS):
        raise ValueError(f"expected 1 to {len(KEYS)} pairs, as many as there are keys, got {pairs}")
    if rounds < 1:
        raise ValueError(f"expected at least one round of questions, got {rounds}")
    random = Random(seed)  # noqa: S311 - prompts, not secrets
    return [_prompt(random, pairs, rounds) for _ in range(count)]


def _prompt(random: Random, pairs: int, rounds: int) -> RecallPrompt:
    keys = random.sample(KEYS, pairs)
    told = [(bytes([key]), bytes([random.choice(VALUES)])) for key in keys]
    prefix = OPEN + b"".join(key + value for key, value in told) + CLOSE
    return RecallPrompt(prefix, tuple(query for _ in range(rounds) for query in random.sample(told, pairs)))
