"""Whether what was measured keeps to a drift budget, in figures and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mamba_checkpoint_cache.drift.budget import DriftBudget


@dataclass(frozen=True, slots=True)
class Control:
    """The arm without a codec. ``exact``: whether it must give the reference's bits; ``largest_kl``: nats, of any position."""

    exact: bool
    largest_kl: float


def verdict(rows: Sequence[Mapping[str, Any]], budget: DriftBudget, control: Control | None) -> dict[str, Any]:
    """``within`` the budget or not, the rows that are ``over`` it with figure, value and ceiling, and the same in a ``text``.

    The mean KL of every row counts, and the relative error of one compression in its worst layer. What is not finite is over.
    Without a codec there is no budget: the KL is 0, or nothing else here can be trusted.
    """
    figures = [(row, figure, ceiling) for row in rows for figure, ceiling in _ceilings(row, budget)]
    over = [_over(row, figure, ceiling) for row, figure, ceiling in figures if not row[figure] <= ceiling]
    sound = control is None or not control.exact or control.largest_kl == 0
    sentences = [] if sound or control is None else [_fault(control)]
    lossy = dict.fromkeys(row["codec"] for row in rows if row["codec"] != "none")
    sentences += [_sentence(codec, [row for row in rows if row["codec"] == codec], budget) for codec in lossy]
    return {
        "within": sound and not over,
        "text": " ".join(sentences) or "No lossy codec was measured.",
        "budget": {"kl_nats": budget.kl_nats, "relative_error": budget.relative_error},
        "over": over,
        "control": None if control is None else asdict(control) | {"sound": sound},
    }


def _ceilings(row: Mapping[str, Any], budget: DriftBudget) -> list[tuple[str, float]]:
    if row["codec"] == "none":
        return []
    kl = ("kl_mean", budget.kl_nats)
    return [kl, ("worst_layer", budget.relative_error)] if row["hops"] == row["distance"] == 1 else [kl]


def _over(row: Mapping[str, Any], figure: str, ceiling: float) -> dict[str, Any]:
    where = {key: row[key] for key in ("codec", "task", "distance", "hops")}
    return where | {"figure": figure, "value": row[figure], "ceiling": ceiling}


def _sentence(codec: str, rows: Sequence[Mapping[str, Any]], budget: DriftBudget) -> str:
    worst = max(rows, key=lambda row: _rank(row["kl_mean"]))
    error = max((row["worst_layer"] for row in rows if row["hops"] == 1), key=_rank)
    within = worst["kl_mean"] <= budget.kl_nats and error <= budget.relative_error
    found = f"its mean KL is up to {_number(worst['kl_mean'])} nats ({place(worst)}), where {budget.kl_nats:g} are allowed"
    found += f", and the relative error of its worst layer is {_number(error)}, where {budget.relative_error:g} is allowed"
    text = f"{codec} is {'within' if within else 'OVER'} the budget: {found}."
    reaches = max((row["kl_ci"][1] for row in rows if row["kl_ci"]), default=0.0)
    if within and reaches > budget.kl_nats:
        text += f" It is too close to call, as its interval reaches {_number(reaches)} nats: measure more prompts."
    return text


def place(row: Mapping[str, Any]) -> str:
    """Where a row was measured, in words."""
    tokens, restores = (_count(row[key], noun) for key, noun in (("distance", "token"), ("hops", "restore")))
    return f"{row['task']}, {tokens} after {restores}"


def _fault(control: Control) -> str:
    return (
        f"Without a codec the KL reaches {_number(control.largest_kl)} nats where it must be exactly 0: a state is stored, "
        "restored or continued wrongly, and no figure here can be trusted."
    )


def _rank(value: float) -> float:
    return value if value == value else float("inf")  # noqa: PLR0124 - NaN is worse than all


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:.2g}"
