"""What tests of the alerts share: the rules as they are, and as each release of Prometheus reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "alerts"
RELEASES = ("2.42", "3")
CACHE = {"job": "mamba-checkpoint-cache", "instance": "a:30000", "cache": "default"}


def rules(path: Path) -> list[dict[str, Any]]:
    """All rules of a file."""
    return [rule for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def run(*command: str | Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(path: Path, content: object) -> Path:
    """A YAML file."""
    path.write_text(yaml.safe_dump(content, width=1000), encoding="utf-8")
    return path


def as_read_by(release: str, folder: Path) -> Path:
    """A copy of the alerts, the ranges of its rules read as a release of Prometheus reads them."""
    copy = folder / "alerts"
    shutil.copytree(ALERTS, copy)
    if release == "3":
        for name in ("recording.yml", "alerting.yml"):
            text = (copy / name).read_text(encoding="utf-8")
            changed = left_open(text)
            assert changed != text
            (copy / name).write_text(changed, encoding="utf-8")
    return copy


def left_open(expression: str) -> str:
    """The expression with each range a millisecond shorter: from release 3 on, a range excludes its left edge."""
    return re.sub(r"\[(\d+)([mhd])(?=[]:])", lambda found: f"[{_less_a_millisecond(*found.groups())}", expression)


def _less_a_millisecond(number: str, unit: str) -> str:
    seconds = int(number) * {"m": 60, "h": 3600, "d": 86400}[unit] - 1
    return f"{seconds}s999ms"
