"""Writes the dashboards: ``python -m dashboards.generate``. What it writes is committed, and a test says if it is stale."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import drift, pool, reuse

FOLDER = Path(__file__).parent / "json"


def generated() -> dict[str, str]:
    """The text of each file of the folder, by name."""
    pages = [module.page() for module in (drift, pool, reuse)]
    encoder = JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False)
    return {f"{page.uid.removeprefix('mamba-checkpoint-')}.json": f"{encoder.encode(page.build())}\n" for page in pages}


def main() -> None:
    """Write the files, and remove any other of the folder."""
    FOLDER.mkdir(exist_ok=True)
    files = generated()
    for stale in FOLDER.glob("*.json"):
        if stale.name not in files:
            stale.unlink()
    for name, text in files.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
