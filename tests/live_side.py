"""What a live Prometheus needs: its configuration, questions to it, and dashboards' expressions as Grafana would send them."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml
from tools import free_port, require_tool, running

ROOT = Path(__file__).parent.parent


class Prometheus(NamedTuple):
    """A running Prometheus."""

    url: str

    def api(self, path: str, **parameters: Any) -> Any:
        """The data of an answer; anything but a success without warnings is an error."""
        answer = httpx.post(f"{self.url}/api/v1/{path}", data=parameters, timeout=30, trust_env=False)
        body = answer.json()
        assert body["status"] == "success", f"{parameters}: {body}"
        assert not body.get("warnings"), f"{parameters}: {body['warnings']}"
        return body["data"]

    def get(self, path: str, **parameters: Any) -> Any:
        """The same for what has to be asked by GET."""
        body = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30, trust_env=False).json()
        assert body["status"] == "success", f"{path}: {body}"
        return body["data"]

    def values(self, expression: str, start: float, end: float, *, instant: bool) -> list[float]:
        """All values of all series that an expression has, at the end or from start to end."""
        if instant:
            return [float(value) for _, value in points(self.api("query", query=expression, time=end), "value")]
        found = self.api("query_range", query=expression, start=start, end=end, step=2)
        return [float(value) for _, value in points(found, "values")]

    def alerts(self) -> dict[tuple[str, str], list[str]]:
        """The states of the alerts that are pending or firing, by name and severity."""
        found: dict[tuple[str, str], list[str]] = {}
        for alert in self.get("alerts")["alerts"]:
            labels = alert["labels"]
            found.setdefault((labels["alertname"], labels["severity"]), []).append(alert["state"])
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]


def points(data: Mapping[str, Any], key: str) -> Iterator[tuple[float, str]]:
    """The points of an answer: scalars, vectors and matrices."""
    if data["resultType"] == "scalar":
        yield data["result"]
    for series in data["result"] if data["resultType"] != "scalar" else ():
        yield from [series[key]] if key == "value" else series[key]


@contextmanager
def prometheus(folder: Path, targets: Sequence[str], rules: Sequence[Path], alertmanager: str = "") -> Iterator[Prometheus]:
    """A Prometheus with the project's own configuration, but for addresses and intervals: those are a second."""
    config = yaml.safe_load((ROOT / "dashboards/stack/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), "1s")
    config["rule_files"] = [str(path) for path in rules]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager] if alertmanager else []
    config["scrape_configs"][0]["static_configs"][0]["targets"] = list(targets)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        require_tool("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
    ]
    with running(command, f"http://{address}/-/ready", folder / "prometheus.log"):
        yield Prometheus(f"http://{address}")


class Query(NamedTuple):
    """A query of a dashboard, and where it stands."""

    board: str
    panel: str
    ref: str
    expression: str
    instant: bool

    @property
    def place(self) -> tuple[str, str]:
        return self.board, self.panel


def panel_queries() -> list[Query]:
    """Every query of every panel of every dashboard."""
    return [
        Query(path.stem, panel["title"], target["refId"], target["expr"], bool(target.get("instant")))
        for path in sorted((ROOT / "dashboards/json").glob("*.json"))
        for panel in _panels(json.loads(path.read_text(encoding="utf-8"))["panels"])
        for target in panel.get("targets", ())
    ]


def _panels(listed: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in listed:
        yield panel
        yield from _panels(panel.get("panels", ()))


def filled_in(expression: str, chosen: Mapping[str, Sequence[str]], span: float) -> str:
    """An expression as Grafana sends it: several values in parentheses, and each escaped for a pattern within a string."""
    variables = {name: values[0] if len(values) == 1 else f"({'|'.join(values)})" for name, values in _escaped(chosen).items()}
    variables |= {"__rate_interval": "20s", "__interval": "2s", "__range": f"{math.ceil(span)}s", "__range_s": f"{span:.0f}"}
    filled = re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", lambda found: variables[found[1] or found[2]], expression)
    assert "$" not in filled, filled
    return filled


def _escaped(chosen: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {name: [re.sub(r"([\\$^*{}\[\]'+?.()|])", r"\\\\\1", value) for value in values] for name, values in chosen.items()}


def variable_values(server: Prometheus) -> dict[str, list[str]]:
    """What each variable of the dashboards offers, asked as Grafana asks for it with All chosen in those before."""
    (board, *others) = (json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "dashboards/json").glob("*.json"))
    listed = [variable for variable in board["templating"]["list"] if variable["type"] == "query"]
    for other in others:
        assert [variable for variable in other["templating"]["list"] if variable["type"] == "query"] == listed
    offered: dict[str, list[str]] = {}
    for variable in listed:
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert asked, variable["query"]
        series = filled_in(asked[1], offered, 60)
        offered[variable["name"]] = server.get(f"label/{asked[2]}/values", **{"match[]": series})
    return offered


def rule_files() -> dict[str, Any]:
    """The files of rules, parsed."""
    return {
        name: yaml.safe_load((ROOT / "alerts" / name).read_text(encoding="utf-8")) for name in ("recording.yml", "alerting.yml")
    }


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def sped_up(folder: Path, factor: int) -> list[Path]:
    """Copies of the rules in which every duration is ``factor`` times as short, down to a second or, for a range, three."""

    def shorter(found: re.Match[str], least: int) -> str:
        return f"{max(least, int(found[1]) * UNITS[found[2]] // factor)}s"

    written = []
    for name, content in rule_files().items():
        for group in content["groups"]:
            group["interval"] = "1s"
            for rule in group["rules"]:
                rule["expr"] = re.sub(r"(?<=[\[ ])(\d+)([smhd])\b", lambda found: shorter(found, 3), rule["expr"])
                if "for" in rule:
                    rule["for"] = re.sub(r"(\d+)([smhd])", lambda found: shorter(found, 1), rule["for"])
        path = folder / name
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        written.append(path)
    return written


@contextmanager
def alertmanager(folder: Path, webhook: str, factor: int) -> Iterator[str]:
    """An Alertmanager with the project's own routes, each receiver a path of one webhook and each wait shorter; its address."""
    config = yaml.safe_load((ROOT / "alerts/alertmanager.yml").read_text(encoding="utf-8"))
    config.pop("templates")
    for route in (config["route"], *config["route"]["routes"]):
        for wait in ("group_wait", "group_interval"):
            if wait in route:
                number, unit = re.fullmatch(r"(\d+)([smhd])", route[wait]).groups()  # type: ignore[union-attr]
                route[wait] = f"{max(1, int(number) * UNITS[unit] // factor)}s"
    for receiver in config["receivers"]:
        name = receiver["name"]
        receiver.clear()
        receiver |= {"name": name, "webhook_configs": [{"url": f"{webhook}/{name}", "send_resolved": True}]}
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        require_tool("prometheus-alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with running(command, f"http://{address}/-/ready", folder / "alertmanager.log"):
        yield address


def choices(offered: Mapping[str, Sequence[str]]) -> dict[str, dict[str, list[str]]]:
    """How the variables may be set: each combination of single values, several, all."""
    singles = [dict(zip(offered, ([value] for value in values), strict=True)) for values in itertools.product(*offered.values())]
    named = {f"one: {', '.join(value[0] for value in chosen.values())}": chosen for chosen in singles}
    several = {name: [*values, "gone"] for name, values in offered.items()}  # a choice outlives the server that it names
    return named | {"several": several, "All": {name: list(values) for name, values in offered.items()}}
