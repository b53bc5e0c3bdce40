"""The report as one page that needs nothing else: words, pictures and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mamba_checkpoint_cache.evaluation import pictures
from mamba_checkpoint_cache.serving.options import OptionError

Report = Mapping[str, Any]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.verdict { padding: .8rem 1rem; border-left: .4rem solid; background: #f2f8f4; border-color: #2f7d4f; }
.verdict.over { background: #fbf1f0; border-color: #a33a3a; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .25rem .55rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { background: #f5f5f5; } th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } figcaption { color: #555; font-size: .9rem; } figure { margin: 0 0 1.5rem; }
"""
_LABELS = {
    "hops": "restores",
    "distance": "tokens after",
    "kl_mean": "mean KL",
    "kl_ci": "95 % interval",
    "kl_p95": "KL p95",
    "kl_p99": "KL p99",
    "top1": "top-1",
    "relative_error": "state error",
    "ci": "95 % interval",
    "difference_ci": "cached less uncached, 95 % interval",
    "same": "the same",
    "shortest": "fewest tokens alike",
    "max_tokens": "tokens decoded",
    "kl": "mean KL",
    "model_layer": "layer of the model",
    "bytes": "bytes more to keep it",
}


def write_page(path: Path, text: str) -> None:
    """Write a page to a file.

    Raises:
        OptionError: if the file can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"can't write {path}: {error.strerror}") from error


def page(report: Report) -> str:
    """The whole document."""
    title = f"Drift of {report['model']}"
    parts = [_verdict(report), *_pictures(report), *_tables(report), *_per_layer(report), _notes(report)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = f"<h1>{escape(title)}</h1>\n" + "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'


def _verdict(report: Report) -> str:
    found, control, state, method = report["verdict"], report["verdict"]["control"], report["state"], report["method"]
    kind, heading = ("verdict", "Within the budget") if found["within"] else ("verdict over", "Over the budget")
    tasks = [f"{figure['prompts']} prompts at depth {figure['depth']} ({task})" for task, figure in method["tasks"].items()]
    how = (
        f"The state was stored and restored in {' and '.join(tasks)}. From there an exact run went on beside runs from restored "
        f"states, over the same tokens in the same steps of {method['step']}. KL is that of the next-token distributions, exact "
        "against restored, in nats. "
    )
    if control is not None and control["largest_kl"] == 0:
        how += "Without a codec it was exactly 0 at every position, so that all of it comes from the codec. "
    shape = " × ".join(map(str, state["shape"]))
    how += f"The state is {shape} (layers, heads, d_v, d_k), {state['dtype']}."
    return f'<p class="{kind}"><b>{heading}.</b> {escape(found["text"])}</p>\n<p>{escape(how)}</p>'


def _pictures(report: Report) -> list[str]:
    window = report["method"]["window"]
    lossy = [codec for codec in report["state_error"] if codec != "none"]
    heads = [
        _picture(
            f"State error by layer and head: {codec}",
            pictures.by_head(report, codec),
            "Norm of the difference over norm of the state, right after one restore, over all prompts.",
        )
        for codec in lossy
    ]
    return [
        _picture(
            "Drift by distance",
            pictures.by_distance(report),
            f"Mean over the last {window} positions up to each distance; the band is the 95 % interval over prompts. Grey lines "
            "are the noise floors: the same prefix computed again in other chunks, and checkpoints in bfloat16.",
        ),
        _picture(
            "Drift by hops",
            pictures.by_hops(report),
            "A conversation that is stored and restored every 16 tokens. The KL is that of the 16 tokens after the last restore.",
        ),
        *heads,
        _picture(
            "Memory against KL",
            pictures.memory_against_kl(report),
            "Further left is more checkpoints in the same memory, further down is less drift. A triangle is a KL of 0.",
        ),
    ]


def _picture(title: str, svg: str, caption: str) -> str:
    return f"<h2>{escape(title)}</h2>\n<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _tables(report: Report) -> list[str]:
    where, kl = ("codec", "task", "hops", "distance"), ("kl_mean", "kl_ci", "kl_p95", "kl_p99")
    rows = (*where, *kl, "top1", "relative_error", "worst_head", "prompts")
    agreed = [
        {"codec": codec, "margin": f"{row['from']:g} … {row['to']:g}", "positions": row["positions"], "top1": row["top1"]}
        for codec, classes in report["agreement"].items()
        for row in classes
    ]
    return [
        _table("Drift, row by row", rows, [row for row in report["rows"] if row["codec"] != "none" or row["kl_mean"] != 0]),
        _table("Recall", ("codec", "cached", "uncached", "ci", "difference_ci", "asked"), _by_codec(report["recall"])),
        _table(
            "Bits per byte of text",
            ("codec", "cached", "uncached", "difference_ci", "bytes", "prompts"),
            _by_codec(report["bits_per_byte"]),
        ),
        _table("Top-1 agreement by the reference's margin", ("codec", "margin", "positions", "top1"), agreed),
        _table(
            "Greedy decoding: prompts whose text stays the same",
            ("codec", "max_tokens", "prompts", "same", "shortest"),
            _by_codec(report["divergence"]),
        ),
        _table(
            f"Checkpoints in the memory of {next(iter(report['capacity'].values()))['native_slots']} native ones",
            ("codec", "bytes_per_checkpoint", "bits_per_element", "slots"),
            _by_codec(report["capacity"]),
        ),
        _table(
            "Noise floors (mean KL over all positions)",
            ("source", "kl"),
            [{"source": source, "kl": report["noise"][f"{source}_kl"]} for source in ("rechunk", "bf16")],
        ),
    ]


def _per_layer(report: Report) -> Iterator[str]:
    for codec, found in report["per_layer"].items():
        keys = ("layer", "model_layer", "kl_mean", "share", "bytes")
        yield _table(f"Layer by layer: {codec}, with all other layers exact", keys, found["rows"])
        yield f"<p>{escape(found['suggestion']['text'])}</p>"


def _by_codec(figures: Mapping[str, Report]) -> list[Report]:
    return [{"codec": codec, **figure} for codec, figure in figures.items()]


def _table(title: str, keys: Sequence[str], rows: Iterable[Report]) -> str:
    lines = ["".join(f"<td>{escape(number(row[key]))}</td>" for key in keys) for row in rows]
    if not lines:
        return ""
    header = "".join(f"<th>{escape(_LABELS.get(key, key.replace('_', ' ')))}</th>" for key in keys)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<h2>{escape(title)}</h2>\n<div class="wide"><table><tr>{header}</tr>\n{body}\n</table></div>'


def _notes(report: Report) -> str:
    notes = "\n".join(f"<li>{escape(note)}</li>" for note in report["notes"])
    return f"<h2>What to know about these figures</h2>\n<ul>{notes}</ul>" if notes else ""


def number(value: Any) -> str:
    """A cell of a table: two or three digits of what was measured, all of a count."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " … ".join(map(number, value))
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
