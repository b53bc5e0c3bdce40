"""Who is told of an alert, in what words, and which alerts are held back because another says it already."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from alert_side import ALERTS, CACHE, rules, run
from tools import free_port, require_tool, running, wait_for

RULES = rules(ALERTS / "alerting.yml")


def test_the_routing_is_valid() -> None:
    """Alertmanager's own check finds nothing."""
    run(require_tool("amtool"), "check-config", ALERTS / "alertmanager.yml")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_each_alert_reaches_the_receiver_of_its_severity(rule: dict[str, Any]) -> None:
    """A page goes to the one who is on call, a ticket to those who work on it."""
    labels = [f"{name}={value}" for name, value in {"alertname": rule["alert"], **rule["labels"]}.items()]
    config = f"--config.file={ALERTS / 'alertmanager.yml'}"

    assert run(require_tool("amtool"), "config", "routes", "test", config, *labels).split() == [rule["labels"]["severity"]]


def test_a_page_is_repeated_soon_and_names_one_cache() -> None:
    """One notification for each alert and cache; a page is sent at once, and again each hour; a ticket each day."""
    route = yaml.safe_load((ALERTS / "alertmanager.yml").read_text(encoding="utf-8"))["route"]
    (page,) = (child for child in route["routes"] if child["receiver"] == "page")

    assert route["group_by"] == ["alertname", "job", "cache"]
    assert (page["group_wait"], page["repeat_interval"], route["repeat_interval"]) == ("10s", "1h", "1d")
    assert [child for child in route["routes"] if child.keys() & {"group_by", "continue", "mute_time_intervals"}] == []


def test_receivers_hold_no_secret() -> None:
    """Whatever proves who one is comes from a file."""
    text = (ALERTS / "alertmanager.yml").read_text(encoding="utf-8")

    assert re.findall(r"(?:routing_key|api_url|password|token|credentials):", text) == []
    assert len(re.findall(r"_file: /etc/alertmanager/secrets/\w+$", text, flags=re.MULTILINE)) == 2


def test_a_notification_says_what_happened_and_links_to_what_to_do(tmp_path: Path) -> None:
    """The text of a notification has the description, the runbook and the dashboard of each alert; the title one summary."""
    notes = [{"summary": f"S{n}", "description": f"D{n}.", "runbook_url": f"/r/{n}.md", "dashboard": f"/d/{n}"} for n in (1, 2)]
    alerts = [{"status": "firing", "labels": {}, "annotations": note} for note in notes]
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"status": "resolved", "alerts": alerts}), encoding="utf-8")
    template = [f"--template.glob={ALERTS / 'notification.tmpl'}", f"--template.data={data}"]

    def rendered(name: str) -> list[str]:
        text = f'--template.text={{{{ template "mamba_checkpoint.{name}" . }}}}'
        return run(require_tool("amtool"), "template", "render", *template, text).strip().splitlines()

    assert rendered("title") == ["Resolved: S1 (and 1 more)"]
    grafana = "http://127.0.0.1:3000"
    assert rendered("text") == [
        *("D1.", f"Runbook: {grafana}/r/1.md", f"Dashboard: {grafana}/d/1"),
        *("D2.", f"Runbook: {grafana}/r/2.md", f"Dashboard: {grafana}/d/2"),
    ]


class Sent(NamedTuple):
    """An alert as it is sent: its name without the prefix, severity and labels."""

    name: str
    severity: str
    labels: dict[str, str]


OTHER = {**CACHE, "cache": "other"}
TARGET = {"job": CACHE["job"], "instance": CACHE["instance"]}
ELSEWHERE = {**CACHE, "instance": "b:30000"}
INHIBITED = [
    *product(
        [Sent("TargetDown", "page", TARGET)],
        [Sent("AllLocked", "page", CACHE), Sent("DriftUnobserved", "ticket", OTHER), Sent("MetricsAbsent", "page", TARGET)],
    ),
    *product(
        [Sent("AllLocked", "page", CACHE)],
        [
            Sent("PoolExhausted", "page", CACHE),
            Sent("PoolExhausted", "ticket", CACHE),
            Sent("PoolExhaustionImminent", "page", CACHE),
        ],
    ),
    *product(
        [Sent("PoolExhausted", "page", CACHE)],
        [
            Sent("PoolExhausted", "ticket", CACHE),
            Sent("PoolExhaustionImminent", "page", CACHE),
            Sent("CacheInert", "ticket", CACHE),
        ],
    ),
    *product(
        [Sent("GuardDegraded", "ticket", CACHE)],
        [
            Sent("DriftAboveCeiling", "page", CACHE),
            Sent("DriftAboveBaseline", "ticket", CACHE),
            Sent("CacheInert", "ticket", CACHE),
        ],
    ),
    (Sent("DriftAboveCeiling", "page", CACHE), Sent("DriftAboveBaseline", "ticket", CACHE)),
]
NOT_INHIBITED = [
    (Sent("TargetDown", "page", TARGET), Sent("AllLocked", "page", ELSEWHERE)),
    (Sent("AllLocked", "page", CACHE), Sent("PoolExhausted", "page", OTHER)),
    (Sent("AllLocked", "page", CACHE), Sent("SlotLeak", "ticket", CACHE)),
    (Sent("PoolExhausted", "ticket", CACHE), Sent("PoolExhaustionImminent", "page", CACHE)),
    (Sent("PoolExhausted", "page", CACHE), Sent("PoolExhaustionImminent", "page", OTHER)),
    (Sent("PoolExhausted", "page", CACHE), Sent("PoolExhausted", "ticket", OTHER)),
    (Sent("DriftAboveCeiling", "page", CACHE), Sent("DriftAboveBaseline", "ticket", OTHER)),
    (Sent("GuardDegraded", "page", CACHE), Sent("NonFiniteStates", "page", CACHE)),
    (Sent("GuardDegraded", "ticket", CACHE), Sent("DriftAboveCeiling", "page", OTHER)),
]


class Alertmanager(NamedTuple):
    url: str

    def send(self, alerts: list[Sent], *, scope: str) -> None:
        """Send alerts; ``scope`` is put in front of their job, so that cases don't see each other."""
        body = [{"labels": self._labels(alert, scope)} for alert in alerts]
        httpx.post(f"{self.url}/api/v2/alerts", json=body, trust_env=False).raise_for_status()

    def notified(self, scope: str) -> list[tuple[str, str]]:
        """Name and severity of the alerts that are not held back."""
        alerts = httpx.get(f"{self.url}/api/v2/alerts?inhibited=false", trust_env=False).json()
        here = [alert["labels"] for alert in alerts if alert["labels"]["job"].startswith(f"{scope}:")]
        return sorted((labels["alertname"].removeprefix("MambaCheckpoint"), labels["severity"]) for labels in here)

    @staticmethod
    def _labels(alert: Sent, scope: str) -> dict[str, str]:
        own = {"alertname": f"MambaCheckpoint{alert.name}", "severity": alert.severity, "component": "mamba-checkpoint-cache"}
        return {**own, **alert.labels, "job": f"{scope}:{alert.labels['job']}"}


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    """A real Alertmanager on loopback with the project's configuration."""
    folder, port = tmp_path_factory.mktemp("alertmanager"), free_port()
    options = [f"--config.file={ALERTS / 'alertmanager.yml'}", f"--storage.path={folder}", "--cluster.listen-address="]
    command = [require_tool("prometheus-alertmanager"), *options, f"--web.listen-address=127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/-/ready", folder / "log"):
        yield Alertmanager(url)


@pytest.mark.parametrize(("cause", "effect"), INHIBITED, ids=lambda sent: f"{sent.name}-{sent.severity}")
def test_a_cause_holds_back_what_follows_from_it(cause: Sent, effect: Sent, alertmanager: Alertmanager) -> None:
    """With both alerts raised, a real Alertmanager notifies of the cause only."""
    scope = f"{cause.name}-{effect.name}-{effect.severity}"
    alertmanager.send([cause, effect], scope=scope)

    # inhibition follows a moment after the alerts
    wait_for("the cause alone", lambda: alertmanager.notified(scope) == [(cause.name, cause.severity)], 10)


def test_nothing_else_is_held_back(alertmanager: Alertmanager) -> None:
    """Alerts of other caches and servers, and those that are causes of their own, get through."""
    for number, pair in enumerate(NOT_INHIBITED):
        alertmanager.send(list(pair), scope=f"both{number}")
    time.sleep(0.5)

    for number, pair in enumerate(NOT_INHIBITED):
        assert alertmanager.notified(f"both{number}") == sorted((sent.name, sent.severity) for sent in pair)
