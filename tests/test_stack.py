"""The compose file and what it mounts: it parses, publishes nothing beyond loopback, and has no password of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import require_tool

from mamba_checkpoint_cache import cli
from mamba_checkpoint_cache.serving.options import ServeOptions

ROOT = Path(__file__).parent.parent
COMPOSE = ROOT / "docker-compose.yml"
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STAGES = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
PINNED = re.compile(r":v?\d+\.\d+\.\d+[\w.-]*$")
PASSWORD = {"GRAFANA_ADMIN_PASSWORD": "a password"}
NO_PASSWORD = {"GRAFANA_ADMIN_PASSWORD": ""}


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=60
    )


def mounts(service: dict[str, Any]) -> dict[str, tuple[Path, str]]:
    """By the place in the container: the file or folder of the checkout, and the mode."""
    listed = (volume.split(":") for volume in service.get("volumes", ()) if volume.startswith("."))
    return {target: (ROOT / source, mode) for source, target, mode in listed}


def test_compose_takes_the_file() -> None:
    """docker-compose itself finds nothing wrong, with and without the load."""
    compose = require_tool("docker-compose")

    for profile in ([], ["--profile", "load"]):
        checked = run(compose, *profile, "config", "-q", env=PASSWORD)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("environment", [{}, NO_PASSWORD], ids=["unset", "empty"])
def test_without_a_password_nothing_starts(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no default password: docker-compose refuses, and says what is missing."""
    monkeypatch.delenv("GRAFANA_ADMIN_PASSWORD", raising=False)

    refused = run(require_tool("docker-compose"), "config", "-q", env=environment)

    assert refused.returncode != 0
    assert "GRAFANA_ADMIN_PASSWORD" in refused.stderr


def test_no_secret_is_in_the_file() -> None:
    """All that looks like a credential comes from outside, and must."""
    named = re.findall(
        r"^\s*\S*(?:PASSWORD|SECRET|TOKEN|KEY)\S*: *(.+)$", COMPOSE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )

    assert named
    assert [value for value in named if not re.fullmatch(r"\$\{\w+:\?[^}]+\}", value)] == []


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_only(name: str) -> None:
    """No port is open to the network, and none takes the network of the host."""
    published = SERVICES[name].get("ports", [])

    assert [port for port in published if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)] == []
    assert "network_mode" not in SERVICES[name]


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_hardened(name: str) -> None:
    """Read-only, without capabilities, never more privileged than at the start; health is checked; state is in named volumes."""
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc", "devices", "user", "userns_mode"}
    assert [volume for volume in service.get("volumes", ()) if "docker.sock" in volume] == []
    assert {volume.split(":")[0] for volume in service.get("volumes", ()) if not volume.startswith(".")} <= load(
        "docker-compose.yml"
    )["volumes"].keys()


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned(name: str) -> None:
    """Each image has a version of three numbers, here or in the Dockerfile."""
    service = SERVICES[name]
    images = [service["image"]]
    if "build" in service:
        images.append({stage: image for image, stage in STAGES}[service["build"]["target"]])

    assert [image for image in images if not PINNED.search(image)] == []


def test_the_image_has_the_version_of_the_package() -> None:
    """A new version is a new image."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    assert {SERVICES[name]["image"] for name in ("server", "load")} == {f"mamba-checkpoint-cache:{version}"}


def test_the_dockerfile_is_pinned_too() -> None:
    """So has each image that is built upon."""
    assert len(STAGES) == DOCKERFILE.count("FROM ")
    assert [image for image, _ in STAGES if not PINNED.search(image)] == []


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_exists(name: str) -> None:
    """Each file or folder is part of the checkout, and can't be written to."""
    mounted = mounts(SERVICES[name])

    assert [str(path) for path, _ in mounted.values() if not path.exists()] == []
    assert {mode for _, mode in mounted.values()} <= {"ro"}


def test_what_the_image_copies_exists() -> None:
    """Each file that the Dockerfile copies from the checkout is there, and not held back from the build."""
    copied = [word for line in re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE) for word in line.split()]
    let_in = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert set(copied) <= set(let_in)


def test_commands_are_those_of_the_package() -> None:
    """The command line takes what the server and the load are started with, and a server's options are valid."""
    parser = cli._parser()
    server = parser.parse_args(SERVICES["server"]["command"])

    assert isinstance(cli._serve_options(server), ServeOptions)
    assert parser.parse_args(SERVICES["load"]["command"]).url == "http://server:30000"


def test_prometheus_reads_its_configuration() -> None:
    """The rules are found from where the configuration lies, in the checkout as in the container."""
    checked = run(require_tool("promtool"), "check", "config", "dashboards/stack/prometheus.yml")
    mounted = mounts(SERVICES["prometheus"])
    config = Path(next(argument for argument in SERVICES["prometheus"]["command"] if "config.file" in argument).split("=")[1])

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert mounted[str(config)][0] == ROOT / "dashboards/stack/prometheus.yml"
    for name in load("dashboards/stack/prometheus.yml")["rule_files"]:
        inside = Path(os.path.normpath(config.parent / name))
        assert mounted[str(inside.parent)][0] / inside.name == (ROOT / "dashboards/stack" / name).resolve()


def test_alertmanager_reads_its_configuration(tmp_path: Path) -> None:
    """Alertmanager's own tool takes it as it lies in the container: beside it only what is mounted."""
    for target, (path, _) in mounts(SERVICES["alertmanager"]).items():
        if path.is_file():
            shutil.copy(path, tmp_path / Path(target).name)

    checked = run(require_tool("amtool"), "check-config", str(tmp_path / "alertmanager.yml"))

    assert checked.returncode == 0, checked.stdout + checked.stderr
    for secret in re.findall(r"_file: (\S+)", (ROOT / "alerts/alertmanager.yml").read_text(encoding="utf-8")):
        assert str(Path(secret).parent) in mounts(SERVICES["alertmanager"])


def test_the_collector_uses_what_it_declares() -> None:
    """Each part that the collector's service names is configured, and the other way round."""
    config = load("dashboards/stack/collector.yml")
    traces = config["service"]["pipelines"]["traces"]

    for kind in ("receivers", "processors", "exporters"):
        assert set(traces[kind]) == config[kind].keys()
    assert set(config["service"]["extensions"]) == config["extensions"].keys()


@pytest.mark.parametrize(
    ("asking", "address"),
    [
        ("prometheus", load("dashboards/stack/prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"][0]),
        (
            "prometheus",
            load("dashboards/stack/prometheus.yml")["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"][0],
        ),
        ("collector", load("dashboards/stack/collector.yml")["exporters"]["otlp_grpc"]["endpoint"]),
        ("load", SERVICES["load"]["command"][1].partition("//")[2]),
        *(
            ("grafana", source["url"].partition("//")[2])
            for source in load("dashboards/provisioning/datasources/datasources.yml")["datasources"]
        ),
    ],
)
def test_addresses_lead_to_services(asking: str, address: str) -> None:
    """Who asks another service asks one that exists, on the port that it has."""
    name, _, port = address.partition(":")

    assert name in SERVICES.keys() - {asking}
    said = json.dumps(SERVICES[name]) + "".join(
        path.read_text(encoding="utf-8") for path, _ in mounts(SERVICES[name]).values() if path.is_file()
    )
    assert re.search(rf"\b{port}\b", said)


def test_spans_go_to_the_collector() -> None:
    """The server's endpoint is the collector's receiver."""
    endpoint = cli._parser().parse_args(SERVICES["server"]["command"]).otlp_endpoint
    receiver = load("dashboards/stack/collector.yml")["receivers"]["otlp"]["protocols"]["http"]["endpoint"]

    assert endpoint == f"http://collector:{receiver.rpartition(':')[2]}"


def test_the_data_source_knows_the_scrape_interval() -> None:
    """Grafana's smallest window for a rate follows from it."""
    sources = load("dashboards/provisioning/datasources/datasources.yml")["datasources"]
    prometheus = next(source for source in sources if source["type"] == "prometheus")

    assert prometheus["isDefault"]
    assert prometheus["jsonData"]["timeInterval"] == load("dashboards/stack/prometheus.yml")["global"]["scrape_interval"]


def test_exemplars_lead_to_traces() -> None:
    """The label of an exemplar leads to the data source of the traces, and Prometheus keeps exemplars."""
    sources = load("dashboards/provisioning/datasources/datasources.yml")["datasources"]
    destinations = [place for source in sources for place in source.get("jsonData", {}).get("exemplarTraceIdDestinations", ())]

    assert [place["name"] for place in destinations] == ["trace_id"]
    assert destinations[0]["datasourceUid"] in {source["uid"] for source in sources if source["type"] == "tempo"}
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]


def test_dashboards_are_provisioned() -> None:
    """Grafana reads the folder in which the generator writes, and starts with one of its files."""
    mounted = mounts(SERVICES["grafana"])
    (provider,) = load("dashboards/provisioning/dashboards/dashboards.yml")["providers"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])

    assert mounted[provider["options"]["path"]][0] == ROOT / "dashboards/json"
    assert (mounted[str(home.parent)][0] / home.name).exists()
    assert mounted["/etc/grafana/provisioning"][0] == ROOT / "dashboards/provisioning"


def test_strangers_may_only_look() -> None:
    """Who has not logged in is a viewer, and can't sign up."""
    settings = SERVICES["grafana"]["environment"]

    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_USERS_ALLOW_SIGN_UP"] == "false"


def test_nobody_changes_what_is_watched_over_the_network() -> None:
    """Prometheus takes questions only, neither commands nor samples, and Alertmanager talks to no other."""
    prometheus, alertmanager = (SERVICES[name]["command"] for name in ("prometheus", "alertmanager"))

    assert [option for option in prometheus if option.startswith("--web.enable")] == []
    assert [option for option in alertmanager if option.startswith("--cluster")] == ["--cluster.listen-address="]


def test_runbooks_are_where_links_lead() -> None:
    """Grafana serves the runbooks under the address that alerts and panels give."""
    public = Path("/usr/share/grafana")
    links = set(re.findall(r"runbook_url: (\S+)", (ROOT / "alerts/alerting.yml").read_text(encoding="utf-8")))
    mounted = mounts(SERVICES["grafana"])

    assert links
    for link in links:
        inside = public / link.removeprefix("/")
        assert (mounted[str(inside.parent)][0] / inside.name).exists()


def test_the_job_is_the_one_that_rules_know() -> None:
    """The rules on availability name a job that is scraped."""
    jobs = {job["job_name"] for job in load("dashboards/stack/prometheus.yml")["scrape_configs"]}
    named = set(re.findall(r'job="([^"]+)"', (ROOT / "alerts/alerting.yml").read_text(encoding="utf-8")))

    assert named
    assert named <= jobs


def test_secrets_are_not_committed() -> None:
    """What is put into the folder for them stays out of the repository."""
    assert (ROOT / "alerts/secrets/.gitignore").read_text(encoding="utf-8") == "*\n!.gitignore\n"
