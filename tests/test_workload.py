"""The generated workload: who shares what with whom, and in which order they come."""

from __future__ import annotations

from collections import Counter

import pytest

from mamba_checkpoint_cache.serving.workload import Session, Workload, generate_workload


def workload(seed: int = 0) -> Workload:
    return generate_workload(chats=9, agents=5, forks=6, resends=4, seed=seed)


def of_kind(kind: str, seed: int = 0) -> list[Session]:
    return [session for session in workload(seed).sessions if session.kind == kind]


def shared_length(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_the_same_arguments_give_the_same_workload() -> None:
    """Nothing but the arguments decides, and the seed does."""
    assert workload(seed=3) == workload(seed=3)
    assert workload(seed=3) != workload(seed=4)


def test_sizes_are_as_asked() -> None:
    """As many sessions of each kind, and every session takes all of its turns."""
    made = workload()

    assert Counter(session.kind for session in made.sessions) == {"chat": 9, "agent": 5, "fork": 6, "resend": 4}
    assert Counter(made.order) == {index: len(session.turns) for index, session in enumerate(made.sessions)}


def test_all_text_is_ascii() -> None:
    """A byte is a token to a model without a tokenizer."""
    assert all(text.isascii() and text for session in workload().sessions for text in (session.opening, *session.turns))


def test_openings_are_shared() -> None:
    """Chats have a few system prompts in common; agents have one, which no chat has."""
    chats, agents = ({session.opening for session in of_kind(kind)} for kind in ("chat", "agent"))

    assert 1 < len(chats) <= 3
    assert len(agents) == 1
    assert not chats & agents


def test_resends_are_word_for_word() -> None:
    """A resend is the first prompt of a chat or an agent, and nothing else."""
    firsts = {(leader.opening, leader.turns[:1]) for kind in ("chat", "agent") for leader in of_kind(kind)}

    assert all((session.opening, session.turns) in firsts for session in of_kind("resend"))


def test_forks_leave_inside_a_turn() -> None:
    """A fork shares the opening and at least half a first turn with a session before it, but not the whole turn."""
    leaders = [*of_kind("chat"), *of_kind("agent")]
    for fork in of_kind("fork"):
        followed = [leader.turns[0] for leader in leaders if leader.opening == fork.opening]
        shared, whole = max((shared_length(fork.turns[0], turn), len(turn)) for turn in followed)
        assert whole // 2 <= shared < whole


def test_sessions_start_in_turn_and_overlap() -> None:
    """First turns come in the order of the sessions; later ones are spread among those of others."""
    made = workload()

    assert list(dict.fromkeys(made.order)) == list(range(len(made.sessions)))
    assert sum(here == there for here, there in zip(made.order, made.order[1:], strict=False)) < len(made.order) // 4


@pytest.mark.parametrize("kind", ["forks", "resends"])
def test_followers_need_someone_to_follow(kind: str) -> None:
    """Asking for forks or resends alone is refused with the reason."""
    with pytest.raises(ValueError, match="follow a chat or an agent"):
        generate_workload(**{"chats": 0, "agents": 0, "forks": 0, "resends": 0, kind: 1})


def test_negative_numbers_are_refused() -> None:
    """The message has the numbers."""
    with pytest.raises(ValueError, match="chats=-1"):
        generate_workload(chats=-1, agents=2, forks=0, resends=0)
