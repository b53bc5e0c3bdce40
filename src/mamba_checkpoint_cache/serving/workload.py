"""A generated workload of shared prefixes: chats, agents, forks, and prompts that are sent again."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal["chat", "agent", "fork", "resend"]

SYSTEM_PROMPTS = 3
"""How many system prompts the chats share."""
SYSTEM_WORDS = (30, 50)
QUESTION_WORDS = (8, 20)
OBSERVATION_WORDS = (15, 30)
CHAT_TURNS = (2, 4)
AGENT_TURNS = (4, 7)

_SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "ze")


@dataclass(frozen=True, slots=True)
class Session:
    """One user of the server. Each prompt is all that was said before, replies included, and the next of ``turns``.

    ``opening`` comes before the first turn and is shared with other sessions. A fork starts as a chat or an agent did and goes
    another way in the middle of its first turn; a resend is one's first prompt, word for word.
    """

    kind: Kind
    opening: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, and the order in which they take their turns: each index stands there as often as the session has turns."""

    sessions: tuple[Session, ...]
    order: tuple[int, ...]


def generate_workload(*, chats: int, agents: int, forks: int, resends: int, seed: int = 0) -> Workload:
    """The same workload for the same arguments: ASCII text, so that a byte is a token to a model without a tokenizer.

    Sessions come one after another and take their turns side by side; forks and resends come last.

    Raises:
        ValueError: if a number is negative, or there are forks or resends but no chat or agent that they could follow.
    """
    if min(chats, agents, forks, resends) < 0:
        raise ValueError(f"expected no negative number of sessions, got {chats=}, {agents=}, {forks=}, {resends=}")
    if (forks or resends) and not chats + agents:
        raise ValueError("forks and resends follow a chat or an agent: ask for at least one of those")
    random = Random(seed)  # noqa: S311 - prompts, not secrets
    systems = [_text(SYSTEM_WORDS, random) for _ in range(SYSTEM_PROMPTS)]
    tools = _text(SYSTEM_WORDS, random)
    leaders = [
        *(Session("chat", random.choice(systems), _turns(CHAT_TURNS, QUESTION_WORDS, random)) for _ in range(chats)),
        *(Session("agent", tools, _turns(AGENT_TURNS, OBSERVATION_WORDS, random)) for _ in range(agents)),
    ]
    random.shuffle(leaders)
    followers = [
        *(_fork(random.choice(leaders), random) for _ in range(forks)),
        *(_resend(random.choice(leaders)) for _ in range(resends)),
    ]
    random.shuffle(followers)
    sessions = (*leaders, *followers)
    return Workload(sessions, _order(sessions, random))


def _text(num_words: tuple[int, int], random: Random) -> str:
    words = ("".join(random.choices(_SYLLABLES, k=random.randint(1, 3))) for _ in range(random.randint(*num_words)))
    return " ".join(words) + ".\n"


def _turns(count: tuple[int, int], num_words: tuple[int, int], random: Random) -> tuple[str, ...]:
    return tuple(_text(num_words, random) for _ in range(random.randint(*count)))


def _fork(leader: Session, random: Random) -> Session:
    first = leader.turns[0]
    kept = first[: random.randrange(len(first) // 2, len(first))]
    return Session("fork", leader.opening, (kept + _text(QUESTION_WORDS, random), *_turns((0, 1), QUESTION_WORDS, random)))


def _resend(leader: Session) -> Session:
    return Session("resend", leader.opening, leader.turns[:1])


def _order(sessions: tuple[Session, ...], random: Random) -> tuple[int, ...]:
    """Turn by turn, at random times between a session's start and the end: the order of the sessions' starts is kept."""
    times: list[tuple[float, int]] = []
    for index, session in enumerate(sessions):
        start = index / len(sessions)
        later = sorted(random.uniform(start, 1) for _ in session.turns[1:])
        times.extend((time, index) for time in (start, *later))
    return tuple(index for _, index in sorted(times))
