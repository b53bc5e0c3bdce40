"""Imports point downwards only, and the core needs five packages."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import mamba_checkpoint_cache

PACKAGE = "mamba_checkpoint_cache"
ROOT = Path(mamba_checkpoint_cache.__file__).parent
LAYERS = (
    {"telemetry"},
    {"state", "errors", "known_models"},
    {"codec", "model_configs"},
    {"arena", "slots", "pools", "plan"},
    {"tree"},
    {"drift", "policy", "results", "lookup", "lifecycle", "leases", "degradation"},
    {"cache"},
    {"integrations"},
    {"small_models"},
    {"serving"},
    {"evaluation"},
    {"bench"},
    {"tables", "arguments", "cli"},
)
CORE = frozenset().union(*LAYERS[:7])
CORE_NEEDS = {"torch", "triton", "prometheus_client", "opentelemetry", "structlog"}
SEES_TELEMETRY = {
    *("telemetry", "pools", "drift", "results", "lookup", "lifecycle", "degradation", "cache"),
    *("integrations", "serving", "bench"),
}
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it; a name taken from the package counts as that module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == PACKAGE else {node.module or ""}
    return found


def part_of(module: str) -> str | None:
    """The layer's name of a module of this package; None for any other."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == PACKAGE else None


def distribution_of(module: str) -> str:
    """What has to be installed for a module: the OpenTelemetry SDK is not its API."""
    return "opentelemetry.sdk" if module.startswith("opentelemetry.sdk") else module.partition(".")[0]


def violations(part: str, imported: set[str]) -> list[str]:
    """What a file of ``part`` imports and mustn't."""
    own = {name for name in map(part_of, imported) if name}
    upward = [name for name in own if RANK[name] > RANK[part]]
    telemetry = ["telemetry"] if "telemetry" in own and part not in SEES_TELEMETRY else []
    others = set(map(distribution_of, imported)) - {PACKAGE} - sys.stdlib_module_names
    return sorted([*upward, *telemetry, *(others - CORE_NEEDS if part in CORE else ())])


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    """No file imports a layer above its own, and none of the core imports more than the five packages it is allowed."""
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")

    assert part in RANK, f"{part} is in no layer: add it to LAYERS and to the architecture page"
    assert violations(part, imports_of(path)) == []


@pytest.mark.parametrize(
    ("part", "module", "refused"),
    [
        ("tree", f"{PACKAGE}.cache", ["cache"]),
        ("codec", f"{PACKAGE}.pools", ["pools"]),
        ("cache", f"{PACKAGE}.serving.engine", ["serving"]),
        ("drift", f"{PACKAGE}.cache", ["cache"]),
        ("small_models", f"{PACKAGE}.serving.models", ["serving"]),
        ("serving", f"{PACKAGE}.evaluation.run", ["evaluation"]),
        ("tree", f"{PACKAGE}.telemetry.recorder", ["telemetry"]),
        ("telemetry", f"{PACKAGE}.state", ["state"]),
        ("pools", "transformers.cache_utils", ["transformers"]),
        ("telemetry", "opentelemetry.sdk.trace", ["opentelemetry.sdk"]),
        ("cache", f"{PACKAGE}.telemetry.recorder", []),
        ("serving", "starlette.applications", []),
    ],
)
def test_the_rule_sees_an_upward_import(part: str, module: str, refused: list[str]) -> None:
    """The check itself refuses what it should and no more."""
    assert violations(part, {module}) == refused


def test_the_page_names_every_part() -> None:
    """The architecture page mentions each part that exists."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")

    parts = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    assert [part for part in sorted(parts) if f"`{part}`" not in page] == []
