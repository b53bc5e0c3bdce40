"""The alerts as code: each fires when it should and not else, every name in them exists, and a runbook says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_side import ALERTS, RELEASES, ROOT, as_read_by, left_open, rules, run, write
from test_cli import commands
from tools import require_tool

from mamba_checkpoint_cache import DriftBudget, cli
from mamba_checkpoint_cache.telemetry.catalogue import METRICS

RUNBOOKS = sorted((ALERTS / "runbooks").glob("*.md"))
UNIT_TESTS = sorted((ALERTS / "tests").glob("*.yml"))
RULES = rules(ALERTS / "alerting.yml")
RECORDED = {rule["record"]: rule["expr"] for rule in rules(ALERTS / "recording.yml")}
NAMES = sorted({rule["alert"] for rule in RULES})


def blocks(runbook: Path) -> list[str]:
    """The queries of a runbook."""
    return re.findall(r"^```promql\n(.*?)^```$", runbook.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module", params=RELEASES)
def alerts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the alerts, as a release of Prometheus reads it."""
    return as_read_by(request.param, tmp_path_factory.mktemp("alerts"))


def test_the_rules_are_valid() -> None:
    """Prometheus' own check finds nothing, duplicates included."""
    run(require_tool("promtool"), "check", "rules", "--lint-fatal", ALERTS / "recording.yml", ALERTS / "alerting.yml")


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_each_alert_fires_when_it_should_and_not_else(path: Path, alerts: Path) -> None:
    """Prometheus' own unit tests pass, whether a range includes a sample at its left edge or not."""
    run(require_tool("promtool"), "test", "rules", alerts / "tests" / path.name)


def test_a_range_of_release_3_lacks_its_left_edge() -> None:
    """What stands for that release reads each range a millisecond shorter, subqueries too, and leaves all else."""
    assert left_open("rate(x[5m]) > y[1d:30s] offset 45m") == "rate(x[299s999ms]) > y[86399s999ms:30s] offset 45m"


def test_every_rule_is_seen_firing_and_every_alert_silent() -> None:
    """There are unit tests of both kinds for each alert, and the full text of each rule is compared in one."""
    cases = [case for path in UNIT_TESTS for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]]
    texts = set()
    for case in cases:
        name, kind = re.fullmatch(r"(\w+) (fires|does not fire) when .+", case["name"]).groups()  # type: ignore[union-attr]
        assert {check["alertname"] for check in case["alert_rule_test"]} == {name}
        found = [alert for check in case["alert_rule_test"] for alert in check["exp_alerts"]]
        assert found or kind == "does not fire"
        for alert in found:
            assert set(alert["exp_annotations"]) == {"summary", "description", "runbook_url", "dashboard"}
            texts.add((name, alert["exp_labels"]["severity"], alert["exp_labels"].get("measure")))
        if kind == "fires":
            assert any(not check["exp_alerts"] for check in case["alert_rule_test"]) or "answers" in case["name"]

    assert texts == {(rule["alert"], rule["labels"]["severity"], rule["labels"].get("measure")) for rule in RULES}
    assert {name for name in NAMES if not any(case["name"].startswith(f"{name} does not fire when") for case in cases)} == set()


def test_the_alerts_are_the_promised_ones() -> None:
    """Each thing that may go wrong has its alert."""
    promised = (
        *("PoolExhaustionImminent", "PoolExhausted", "AllLocked", "EvictionStorm", "CacheInert", "DriftAboveCeiling"),
        *("DriftAboveBaseline", "DriftUnobserved", "GuardDegraded", "NonFiniteStates", "SlotLeak", "TelemetryFailing"),
        *("TargetDown", "MetricsAbsent"),
    )
    assert sorted(f"MambaCheckpoint{name}" for name in promised) == NAMES


def test_the_readme_lists_each_alert_with_its_severities() -> None:
    """The table has a line per alert, and says whom it calls."""
    text = (ALERTS / "README.md").read_text(encoding="utf-8")
    listed = {
        name: set(severities.split(", ")) for name, severities in re.findall(r"\| `(MambaCheckpoint\w+)` \| ([a-z, ]+) \|", text)
    }

    assert listed == {name: {rule["labels"]["severity"] for rule in RULES if rule["alert"] == name} for name in NAMES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_each_rule_says_who_what_and_where(rule: dict[str, Any]) -> None:
    """Labels and annotations are complete, and the summary says which server."""
    annotations = rule["annotations"]

    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["labels"]["component"] == "mamba-checkpoint-cache"
    assert set(annotations) == {"summary", "description", "runbook_url", "dashboard"}
    assert "$labels.instance" in annotations["summary"]
    assert annotations["description"].endswith(".")
    assert annotations["runbook_url"].endswith(f"/{rule['alert']}.md")


@pytest.mark.parametrize("expression", [*RECORDED.values(), *(rule["expr"] for rule in RULES)])
def test_no_rule_mixes_caches(expression: str) -> None:
    """Whatever is aggregated or matched keeps job and instance apart, and the cache where there is one."""
    kept = [set(re.split(r",\s*", labels)) for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)]

    if "up{" not in expression and "mamba_checkpoint_" in expression:
        assert kept
        assert all({"job", "instance", "cache"} <= labels for labels in kept)
    assert all({"job", "instance"} <= labels for labels in kept)
    assert "without" not in expression


KNOWN: dict[str, dict[str, tuple[str, ...]]] = {}
for _metric in METRICS:
    _labels: dict[str, tuple[str, ...]] = {label.name: label.values for label in _metric.labels}
    _suffixes = ("_sum", "_count", "_bucket") if _metric.type == "histogram" else ("",)
    for _suffix in _suffixes:
        _bounds = {"le": (*map(str, _metric.buckets), "+Inf")} if _suffix == "_bucket" else {}
        KNOWN[_metric.full_name + _suffix] = {"job": (), "instance": (), "cache": (), **_labels, **_bounds}


def complaints(text: str) -> Iterator[str]:
    """Metrics, labels and label values in a text that the catalogue doesn't have, and recorded series that no rule makes."""
    yield from (name for name in re.findall(r"\bmamba_checkpoint:[a-z0-9_:]+", text) if name not in RECORDED)
    for name, selector in re.findall(r"\b(mamba_checkpoint_[a-z0-9_]+)(\{[^}]*\})?", text):
        if name in KNOWN:
            yield from (f"{name}{{{wrong}}}" for wrong in mismatches(KNOWN[name], selector))
        elif name != "mamba_checkpoint_cache":  # the package
            yield name
    labels = {label for found in KNOWN.values() for label in found}
    for group in re.findall(r"\b(?:by|on) \(([a-z_, ]*)\)", text):
        yield from (label for label in re.split(r",\s*", group) if label not in labels)


def mismatches(known: dict[str, tuple[str, ...]], selector: str) -> Iterator[str]:
    """Matchers for a label that the metric doesn't have, or a value that the label doesn't take."""
    for label, operator, text in re.findall(r'(\w+)(=~|!=|!~|=)"([^"]*)"', selector):
        values = text.split("|") if "~" in operator else [text]
        if label not in known:
            yield label
        elif known[label]:
            yield from (f"{label}={value}" for value in values if value not in known[label])


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted(ALERTS.glob("*.*")), *UNIT_TESTS, *RUNBOOKS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_name_is_in_the_catalogue(path: Path) -> None:
    """Metrics, labels and label values in rules, their tests, runbooks and READMEs exist."""
    assert list(complaints(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "mamba_checkpoint_slot_total",
        'mamba_checkpoint_slots{state="used"}',
        'mamba_checkpoint_slots{state=~"free|used"}',
        'mamba_checkpoint_slots{reason="x"}',
        'mamba_checkpoint_relative_error_bucket{le="0.07"}',
        "sum by (job, engine) (up)",
        "mamba_checkpoint:slots:sum",
    ],
)
def test_a_wrong_name_is_found(text: str) -> None:
    """The check above sees a metric, label, value, bound or recorded series that doesn't exist."""
    assert len(list(complaints(text))) == 1


def test_without_a_guard_the_ceiling_is_what_a_budget_allows_by_default() -> None:
    """The constants in the rule, in its text and in the runbook are the default of :class:`DriftBudget`."""
    (rule,) = (rule for rule in RULES if "mamba_checkpoint_drift_budget" in rule["expr"])
    ceiling = DriftBudget().relative_error
    runbook = (ALERTS / "runbooks" / f"{rule['alert']}.md").read_text(encoding="utf-8")

    assert f" or {ceiling} + 0 * " in " ".join(rule["expr"].split())
    assert f"over {ceiling} where there is no guard" in rule["annotations"]["description"]
    assert f"its default, {ceiling}." in runbook
    assert f"(`--max-kl`, {DriftBudget().kl_nats} nats)" in runbook


def test_each_alert_has_a_runbook_and_no_runbook_is_left_over() -> None:
    """Alerts and runbooks are the same set."""
    assert [path.stem for path in RUNBOOKS] == NAMES


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_says_what_it_means_costs_is_found_out_and_mended(path: Path) -> None:
    """Each has the four parts in order, queries to paste, links that lead somewhere, and options that exist."""
    text = path.read_text(encoding="utf-8")

    assert re.findall(r"^#+ .*", text, flags=re.MULTILINE) == [
        *(f"# {path.stem}", "## Meaning", "## Impact", "## Diagnosis", "## Mitigation")
    ]
    assert blocks(path)
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not (path.parent / link).is_file()] == []
    assert set(re.findall(r"(?<=`)--[a-z-]+", text)) - options() == set()


@cache
def options() -> set[str]:
    """Every option of every command."""
    return {option for words in commands(cli._parser()) for option in re.findall(r"--[a-z-]+", help_of(words))}


def help_of(words: tuple[str, ...]) -> str:
    parser: Any = cli._parser()
    for word in words:
        (choices,) = (action.choices for action in parser._actions if hasattr(action.choices, "items"))
        parser = choices[word]
    return str(parser.format_help())


def test_the_queries_of_runbooks_parse(tmp_path: Path) -> None:
    """Each query can be pasted into Prometheus."""
    queries = [{"record": f"runbook:{n}", "expr": query} for n, query in enumerate(q for path in RUNBOOKS for q in blocks(path))]
    path = write(tmp_path / "queries.yml", {"groups": [{"name": "runbooks", "rules": queries}]})

    assert f"{len(queries)} rules found" in run(require_tool("promtool"), "check", "rules", path)
