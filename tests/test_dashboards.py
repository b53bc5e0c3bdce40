"""The committed dashboards: as generated, true to the catalogue, and readable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dashboards import look, queries
from dashboards.generate import FOLDER, generated
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.telemetry.catalogue import CACHE_LABEL, METRICS

ROOT = Path(__file__).parent.parent
TITLES = {
    "mamba-checkpoint-drift": "Memory saved against accuracy drift",
    "mamba-checkpoint-pool": "Pool",
    "mamba-checkpoint-reuse": "Reuse",
}
UNSHOWN: dict[str, str] = {}
"""Metrics that are on no dashboard on purpose, and why."""
FOREIGN = {"job", "instance", "le"}
"""Labels that Prometheus adds, or that a histogram has by itself."""
CHOSEN = {"job": "$job", "instance": "$instance", "cache": "$cache"}
BY_NAME = {metric.full_name: metric for metric in METRICS}
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SCRAPED = {f"{metric.full_name}{suffix}": metric for metric in METRICS for suffix in SUFFIXES[metric.type]}
SELECTOR = re.compile(r"\b((?:mamba_checkpoint_|up\b)\w*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|=|!=|!~)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)")

BOARDS: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
PANELS: list[dict[str, Any]] = [panel for board in BOARDS for panel in board["panels"] if panel["type"] != "row"]
each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
each_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each selector of an expression: the name of the metric, and label, operator and value of its matchers."""
    for name, matchers in SELECTOR.findall(expression):
        yield name, MATCHER.findall(matchers)


def metrics_of(expression: str) -> set[str]:
    """The metrics that an expression reads, without the suffixes of a histogram."""
    return {SCRAPED[name].full_name if name in SCRAPED else name for name, _ in selectors(expression)}


def override(panel: dict[str, Any], name: str, setting: str) -> Any:
    """What the overrides of the field ``name`` say of a setting."""
    for rule in panel["fieldConfig"]["overrides"]:
        if rule["matcher"] == {"id": "byName", "options": name}:
            for found in rule["properties"]:
                if found["id"] == setting:
                    return found["value"]
    return None


def units(panel: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each expression of a panel that is shown as a number, with its unit."""
    shown: dict[str, str] = {}
    hidden: dict[str, bool] = {}
    for transformation in panel.get("transformations", ()):
        shown |= transformation["options"].get("renameByName", {})
        hidden |= transformation["options"].get("excludeByName", {})
    for target in panel["targets"]:
        field = f"Value #{target['refId']}"
        if field not in hidden:
            own = override(panel, shown.get(field, field), "unit")
            yield target["expr"], own or panel["fieldConfig"]["defaults"]["unit"]


def closing(text: str, start: int) -> int:
    """Where the bracket that opens at ``start`` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"never closed: {text[start:]}")


def test_the_committed_files_are_what_the_generator_writes() -> None:
    """A change of the generator, or of a file by hand, is seen: run ``python -m dashboards.generate``."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}

    assert committed == generated()


def test_there_are_the_promised_dashboards() -> None:
    """Alerts and links lead to these ids."""
    assert {board["uid"]: board["title"] for board in BOARDS} == TITLES


@each_board
def test_a_dashboard_can_be_loaded(board: dict[str, Any]) -> None:
    """Ids are distinct, panels have a known kind and queries with distinct names, and all read the chosen data source."""
    assert board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert ids == list(range(1, len(ids) + 1))
    for panel in board["panels"]:
        if panel["type"] == "row":
            assert panel["panels"] == []
            continue
        assert panel["type"] in {"timeseries", "stat", "heatmap", "state-timeline", "table", "xychart"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}


@each_board
def test_panels_fill_the_grid_without_overlap(board: dict[str, Any]) -> None:
    """Panels lie within 24 columns, none over another, and no row of them ends in a hole."""
    places = [panel["gridPos"] for panel in board["panels"]]

    for place in places:
        assert place["x"] + place["w"] <= 24
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, (a, b)
    assert sum(place["w"] * place["h"] for place in places) == 24 * max(place["y"] + place["h"] for place in places)


@each_board
def test_variables_narrow_each_other(board: dict[str, Any]) -> None:
    """Data source, job, instance and cache; the last three take one, several or all, and offer what the ones before leave."""
    source, *chosen = board["templating"]["list"]

    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert [(v["name"], v["multi"], v["includeAll"], v["current"]["value"]) for v in chosen] == [
        (name, True, True, ["$__all"]) for name in CHOSEN
    ]
    assert [v["query"]["query"] for v in chosen] == [
        "label_values(mamba_checkpoint_info, job)",
        'label_values(mamba_checkpoint_info{job=~"$job"}, instance)',
        'label_values(mamba_checkpoint_info{job=~"$job", instance=~"$instance"}, cache)',
    ]
    assert not any("allValue" in v for v in chosen), ".+ would let `up` count targets that are none of ours"


@each_panel
def test_a_panel_asks_and_advises(panel: dict[str, Any]) -> None:
    """The title is a question; the description says what to do when it looks bad; there are a unit and thresholds."""
    assert panel["title"].endswith("?")
    assert len(panel["title"]) <= 60
    assert re.search(r"\bIf [^.]+[:,] [^.]+\.", panel["description"]), panel["description"]
    assert 60 <= len(panel["description"]) <= 330
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    steps = defaults["thresholds"]["steps"]
    assert steps[0]["value"] is None
    assert [step["value"] for step in steps[1:]] == sorted(step["value"] for step in steps[1:])


@each_panel
def test_a_panel_can_be_read(panel: dict[str, Any]) -> None:
    """Series have a legend, axes start at 0 unless logarithmic, and a number that isn't there is explained, not alarming."""
    defaults = panel["fieldConfig"]["defaults"]
    if panel["type"] == "timeseries":
        assert panel["options"]["legend"]["showLegend"]
        assert all(target["legendFormat"] for target in panel["targets"])
        assert defaults.get("min") == 0 or defaults["custom"]["scaleDistribution"]["type"] == "log"
    assert defaults["noValue"]
    if panel["type"] == "stat":
        assert defaults["thresholds"]["steps"][0]["color"] in {"text", "blue"}


def test_titles_are_unique() -> None:
    """No two panels ask the same, over all dashboards."""
    titles = [panel["title"] for panel in PANELS]

    assert len(set(titles)) == len(titles)


def test_no_two_panels_show_the_same() -> None:
    """No two panels have all their queries in common."""
    seen: dict[frozenset[str], str] = {}
    for panel in PANELS:
        queried = frozenset(expressions(panel))
        assert queried not in seen, f"{panel['title']} shows what {seen[queried]} does"
        seen[queried] = panel["title"]


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    """Each metric of the catalogue is on some panel, or among those with a reason not to be; never both."""
    shown = {name for panel in PANELS for expression in expressions(panel) for name in metrics_of(expression)}

    assert shown - {"up"} == BY_NAME.keys() - UNSHOWN.keys()


@each_panel
def test_queries_use_what_exists(panel: dict[str, Any]) -> None:
    """Each metric is scraped under that name, each label is one of its own, each value one that the label takes."""
    for expression in expressions(panel):
        assert set(re.findall(r"mamba_checkpoint_\w+", expression)) == {name for name, _ in selectors(expression)} - {"up"}
        for name, matchers in selectors(expression):
            if name == "up":
                continue
            values = {label.name: label.values for label in SCRAPED[name].labels}
            for label, _, value in matchers:
                if label not in CHOSEN:
                    assert set(value.split("|")) <= set(values[label]), (name, label, value)
                assert label in {*values, *FOREIGN, CACHE_LABEL}


@each_panel
def test_queries_group_by_labels_that_exist(panel: dict[str, Any]) -> None:
    """What is grouped by, joined on or put in a legend is a label of a metric of that query."""
    for target in panel["targets"]:
        metrics = [BY_NAME[name] for name in metrics_of(target["expr"]) - {"up"}]
        known = {label for metric in metrics for label in metric.label_names} | FOREIGN
        grouped = {label for group in GROUPING.findall(target["expr"]) for label in group.split(", ")}
        assert grouped <= known
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known & (grouped | {"le"})


@each_panel
def test_queries_follow_the_variables(panel: dict[str, Any]) -> None:
    """Every selector is narrowed to the chosen job, instance and cache; ``up`` has no cache."""
    for expression in expressions(panel):
        for name, matchers in selectors(expression):
            chosen = {label: value for label, operator, value in matchers if operator == "=~" and label in CHOSEN}
            assert chosen == {label: value for label, value in CHOSEN.items() if name != "up" or label != "cache"}


@each_panel
def test_denominators_are_guarded(panel: dict[str, Any]) -> None:
    """Whatever is divided by is over 0, so that a quiet time is a gap and never NaN; so is the quantile of nothing."""
    for expression in expressions(panel):
        for slash in re.finditer("/", expression):
            start = slash.end() + 1
            assert expression[start - 1 : start + 1] == " (", expression
            assert expression[: closing(expression, start)].endswith(" > 0"), expression
        for call in re.finditer(r"histogram_quantile\(", expression):
            assert expression[closing(expression, call.end() - 1) + 1 :].startswith(" >= 0"), expression


def fitting(expression: str) -> set[str]:
    """The units in which the outcome of an expression may be shown."""
    names = metrics_of(expression)
    bases = {BY_NAME[name].unit for name in names - {"up"}}
    per_second, quotient = "rate(" in expression, " / (" in expression
    observed = "_bucket{" in expression
    budget = "mamba_checkpoint_drift_budget" in names
    cases = (
        (budget and (quotient or 'kind="relative_error"' in expression), {"percentunit"}),
        (budget, {"si: nats"}),
        ("deriv(" in expression, {"s"}),
        (bases == {"bytes"} and quotient, {"suffix:×", "percentunit"}),
        (bases == {"bytes"}, {"binBps"} if per_second else {"bytes"}),
        (bases == {"bytes", ""}, {"percentunit"}),
        (bases == {"bytes", "seconds"}, {"binBps"}),
        ("nats" in bases, {"si: nats"}),
        ("seconds" in bases and observed, {"s"}),
        ("seconds" in bases, {"percentunit"} if "_seconds_sum{" in expression else {"suffix:/s"}),
        ("mamba_checkpoint_relative_error" in names and observed, {"percentunit"}),
        (names == {"mamba_checkpoint_hops"}, {"none"}),
        (quotient or names == {"up"}, {"percentunit", "suffix:×"}),
        (per_second, {"suffix:/min"} if expression.startswith("60 * ") else {"suffix:/s"}),
    )
    return next((found for holds, found in cases if holds), {"none"})


@each_panel
def test_units_fit_what_is_measured(panel: dict[str, Any]) -> None:
    """Bytes are shown as bytes, seconds as seconds, shares as percent, rates per second; and nothing else is."""
    for expression, unit in units(panel):
        assert unit in fitting(expression), expression


@each_panel
def test_buckets_lead_to_traces(panel: dict[str, Any]) -> None:
    """A query over time that reads buckets asks for exemplars; one for a single moment never, since they'd be another frame."""
    for target in panel["targets"]:
        assert target["instant"] is not target["range"]
        assert target["range"] is (panel["type"] in {"timeseries", "heatmap", "state-timeline"})
        assert bool(target.get("exemplar")) is (target["range"] and "_bucket{" in target["expr"])


@each_panel
def test_known_values_keep_their_colour(panel: dict[str, Any]) -> None:
    """Each value of a label that is a panel's legend has a colour of its own there, so that none is red by chance."""
    if panel["type"] != "timeseries":
        return
    for target in panel["targets"]:
        if not (shown := re.fullmatch(r"\{\{(\w+)\}\}", target["legendFormat"])):
            continue
        metrics = [BY_NAME[name] for name in metrics_of(target["expr"]) - {"up"}]
        values = [value for metric in metrics for known in metric.labels if known.name == shown[1] for value in known.values]
        colours = [override(panel, value, "color") for value in values]
        assert all(colours)
        assert [colour["fixedColor"] for colour in colours] == [look.COLOURS[value] for value in values]


def test_good_news_is_never_red() -> None:
    """Red and its shades are for what somebody has to look at."""
    red = {name for name, colour in look.COLOURS.items() if "red" in colour}

    assert red == {"exhausted", "all_locked", "non_finite", "depth_mismatch", "over_budget", "failed", "rejected", "stopped"}


def test_runbooks_are_the_alerts_that_exist() -> None:
    """Each alert's runbook is linked from some panel, and each link leads to the runbook of an alert."""
    linked = {link["url"] for panel in PANELS for link in panel["links"]}
    alerts = set(re.findall(r"- alert: (\w+)", (ROOT / "alerts/alerting.yml").read_text(encoding="utf-8")))

    assert linked == {f"/public/runbooks/{alert}.md" for alert in alerts}
    assert {f"{alert}.md" for alert in alerts} <= {path.name for path in (ROOT / "alerts/runbooks").iterdir()}
    assert "./alerts/runbooks:/usr/share/grafana/public/runbooks:ro" in (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


def test_alerts_lead_to_dashboards_that_exist() -> None:
    """Each dashboard that an alert's annotation names is one of these."""
    named = re.findall(r"dashboard: '?/d/([\w-]+)", (ROOT / "alerts/alerting.yml").read_text(encoding="utf-8"))

    assert named
    assert set(named) <= TITLES.keys()


def test_ceilings_are_those_that_caches_were_given() -> None:
    """Each panel of a measured drift draws its ceiling as a line of its own, and without a guard what is allowed by default."""
    drawn = {}
    for panel in PANELS:
        for target in panel["targets"]:
            if target.get("legendFormat", "").startswith("ceiling "):
                (rule,) = (rule for rule in panel["fieldConfig"]["overrides"] if rule["matcher"]["id"] == "byRegexp")
                assert re.match(rule["matcher"]["options"].strip("/"), "ceiling default on a:30000")
                assert {"mode": "fixed", "fixedColor": "red"} in [found["value"] for found in rule["properties"]]
                drawn[panel["title"]] = target["expr"]

    assert drawn.keys() == {"How large is the error of a whole state?", "How far apart are the next-token distributions?"}
    for kind, expression in zip(("relative_error", "kl_nats"), drawn.values(), strict=True):
        assert f'kind="{kind}"' in expression
        assert f" or {getattr(DriftBudget(), kind)} + 0 * " in expression


def test_each_measure_is_held_against_its_own_ceiling() -> None:
    """What is shown as a share of a budget is the error over the error's ceiling, or the KL over the KL's."""
    shares = [e for panel in PANELS for e in expressions(panel) if "mamba_checkpoint_drift_budget" in e and " / " in e]
    measured = {"relative_error": "mamba_checkpoint_relative_error", "kl_nats": "mamba_checkpoint_logit_kl_nats"}

    assert {kind for share in shares for kind in re.findall(r'kind="(\w+)"', share)} == measured.keys()
    for share in shares:
        (kind,) = re.findall(r'kind="(\w+)"', share)
        assert metrics_of(share) == {measured[kind], "mamba_checkpoint_drift_budget", "mamba_checkpoint_info"}


@pytest.mark.parametrize("text", ["/home", "/root", "/tmp", "/usr", "127.0.0.1", "localhost"])
def test_no_dashboard_knows_a_machine(text: str) -> None:
    """No path and no address of any machine is in the files."""
    assert [name for name, content in generated().items() if text in content] == []


@pytest.mark.parametrize(
    ("name", "labels", "message"),
    [
        ("slot", {}, "the catalogue has no metric 'slot'"),
        ("slots", {"kind": "free"}, "mamba_checkpoint_slots has no label 'kind', only pool, state"),
        ("slots", {"state": "free|busy"}, r"label state of mamba_checkpoint_slots is one of .*, never \['busy'\]"),
        ("hops", {}, "hops is a histogram: ask for its quantile, mean or buckets"),
    ],
)
def test_the_generator_refuses_what_does_not_exist(name: str, labels: dict[str, str], message: str) -> None:
    """An unknown metric, label or value is an error in the generator, and no empty panel."""
    with pytest.raises(ValueError, match=message):
        queries.series(name, **labels)


def test_the_generator_refuses_a_histogram_that_is_none() -> None:
    """Quantiles are asked of histograms only."""
    with pytest.raises(ValueError, match="the catalogue has no histogram 'slots'"):
        queries.quantile(0.5, "slots")
