"""PromQL, put together from the catalogue: a metric, label or value that doesn't exist is an error here, not an empty panel."""

from __future__ import annotations

from mamba_checkpoint_cache.telemetry.catalogue import METRICS, NO_SLOT, Label, Metric

CHOSEN = 'job=~"$job", instance=~"$instance", cache=~"$cache"'
"""What every selector says of the dashboard's variables."""
CACHE = "job, instance, cache"
"""What names one cache. Two servers may each have one called ``default``."""
RECENT = "5m"
"""What *now* means where a number needs traffic."""
SAMPLED = "15m"
"""The same for what is sampled, and for trends: a shorter time would hold too few of either."""
PER_STEP = "$__rate_interval"
SHORTAGE = "|".join(NO_SLOT)

_METRICS = {metric.name: metric for metric in METRICS}


def series(name: str, **labels: str) -> str:
    """The chosen series of a metric; a label's value may be several, with ``|`` between."""
    metric = _METRICS.get(name)
    if metric is None:
        raise ValueError(f"the catalogue has no metric {name!r}")
    if metric.type == "histogram":
        raise ValueError(f"{name} is a histogram: ask for its quantile, mean or buckets")
    return _select(metric, "", labels)


def rate(name: str, window: str = PER_STEP, **labels: str) -> str:
    """How much a counter grows in a second."""
    return f"rate({series(name, **labels)}[{window}])"


def total(expression: str, by: str = "") -> str:
    """The sum, of everything or by labels."""
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def ratio(numerator: str, denominator: str) -> str:
    """A quotient, and nothing at all where the denominator is 0."""
    return f"{numerator} / ({denominator} > 0)"


def share(name: str, of: str = "", *, by: str = "", window: str = PER_STEP, **labels: str) -> str:
    """Which part of all that ``name`` counts, or of the part whose labels say ``of`` (``label=value``), has ``labels``."""
    key, _, value = of.partition("=")
    whole = rate(name, window, **({key: value} if of else {}))
    return ratio(total(rate(name, window, **labels), by), total(whole, by))


def quantile(q: float, name: str, *, by: str = "", window: str = PER_STEP, **labels: str) -> str:
    """A quantile of a histogram. The comparison drops the NaN of a time in which nothing was observed."""
    return f"histogram_quantile({q}, {buckets(name, by=by, window=window, **labels)}) >= 0"


def buckets(name: str, *, by: str = "", window: str = PER_STEP, **labels: str) -> str:
    """The buckets of a histogram, per second."""
    return total(f"rate({_part(name, 'bucket', labels)}[{window}])", f"{by}, le" if by else "le")


def mean(name: str, *, by: str = "", window: str = PER_STEP, **labels: str) -> str:
    """The mean of what a histogram observed."""
    return ratio(*(total(f"rate({_part(name, part, labels)}[{window}])", by) for part in ("sum", "count")))


def busy(window: str = PER_STEP, **labels: str) -> str:
    """Seconds that operations took, per second."""
    return f"rate({_part('operation_seconds', 'sum', labels)}[{window}])"


def calls(window: str = PER_STEP, **labels: str) -> str:
    """Operations per second."""
    return f"rate({_part('operation_seconds', 'count', labels)}[{window}])"


def with_codec(expression: str) -> str:
    """An expression by :data:`CACHE`, and by codec too, which only the info metric knows."""
    return f"({expression}) * on ({CACHE}) group_left (codec) {series('info')}"


def _part(name: str, part: str, labels: dict[str, str]) -> str:
    metric = _METRICS.get(name)
    if metric is None or metric.type != "histogram":
        raise ValueError(f"the catalogue has no histogram {name!r}")
    return _select(metric, f"_{part}", labels)


def _select(metric: Metric, suffix: str, labels: dict[str, str]) -> str:
    known = {label.name: label for label in metric.labels}
    matchers = [CHOSEN]
    for name, value in labels.items():
        if name not in known:
            raise ValueError(f"{metric.full_name} has no label {name!r}, only {', '.join(known) or 'none'}")
        _check(metric, known[name], value)
        matchers.append(f'{name}{"=~" if "|" in value else "="}"{value}"')
    return f"{metric.full_name}{suffix}{{{', '.join(matchers)}}}"


def _check(metric: Metric, label: Label, value: str) -> None:
    unknown = set(value.split("|")) - set(label.values)
    if unknown:
        raise ValueError(f"label {label.name} of {metric.full_name} is one of {label.values}, never {sorted(unknown)}")
