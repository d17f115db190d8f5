"""The compose files as `docker compose config` reads them; Docker itself is not asked, and no image is needed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.host.provision.secret import RULES, make_secrets
from appliance.host.provision.verb import add_arguments

ROOT = Path(__file__).parents[2]
FRONTS = ("one-api", "new-api")
FILES = [
    ("appliance.yaml",),
    ("appliance.yaml", "gpu.yaml"),
    *(((f"{front}.yaml",)) for front in FRONTS),
    *((f"{front}.yaml", "gpu.yaml") for front in FRONTS),
    ("replicas.yaml",),
    ("replicas.yaml", "replicas-gpu.yaml"),
    ("appliance.yaml", "dev.yaml"),
    ("appliance.yaml", "monitoring.yaml"),
]
REPLICAS = ("appliance-1", "appliance-2")


def compose(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `docker compose` without a daemon: a command that asks Docker fails with another error."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    nowhere = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}
    argv = ["docker", "compose", *words]
    return subprocess.run(argv, cwd=ROOT, env=kept | nowhere | variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module", autouse=True)
def _compose_is_there() -> None:
    if compose("version").returncode:
        pytest.skip("no `docker compose` is here")


def files(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("-f", f"compose/{name}"))


@cache
def read(*names: str) -> dict[str, Any]:
    done = compose(*files(*names), "config", "--format", "json", APPLIANCE_SECRETS="/secrets")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def services(front: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read(f"{front}.yaml")["services"]
    return found


@pytest.mark.parametrize("names", FILES, ids="+".join)
def test_config_is_clean(names: tuple[str, ...]) -> None:
    done = compose(*files(*names), "config", "--quiet", APPLIANCE_SECRETS="/secrets")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("verb", ["config", "up"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_said_before_anything_starts(front: str, verb: str, value: str | None) -> None:
    given = {} if value is None else {"APPLIANCE_SECRETS": value}
    done = compose(*files(f"{front}.yaml"), verb, **given)
    assert done.returncode != 0
    assert "required variable APPLIANCE_SECRETS is missing a value" in done.stderr
    assert "python3 -m appliance.host.provision secrets FOLDER makes" in done.stderr
    assert "nowhere" not in done.stderr  # Docker was not asked


@pytest.mark.parametrize("front", FRONTS)
def test_every_service_is_hardened(front: str) -> None:
    for name, service in services(front).items():
        assert service["user"] == "1000:0", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert all(volume["type"] == "volume" for volume in service.get("volumes", ())), name


@pytest.mark.parametrize("front", FRONTS)
def test_only_the_front_door_is_published_and_the_database_is_inside(front: str) -> None:
    published = {name: service["ports"] for name, service in services(front).items() if service.get("ports")}
    assert set(published) == {front}
    assert [(port["host_ip"], port["published"], port["target"]) for port in published[front]] == [
        ("127.0.0.1", "3000", 3000)
    ]
    assert set(services(front)["database"]["networks"]) == {"database"}
    assert read(f"{front}.yaml")["networks"]["database"]["internal"] is True
    beside = {name for name, service in services(front).items() if "database" in (service.get("networks") or ())}
    assert beside == {"database", front}


@pytest.mark.parametrize("front", FRONTS)
def test_each_start_waits_for_what_it_needs(front: str) -> None:
    found = {
        name: {other: needs["condition"] for other, needs in service.get("depends_on", {}).items()}
        for name, service in services(front).items()
    }
    checked = {"check": "service_completed_successfully"}
    assert found == {
        "check": {},
        "database": checked,
        front: checked | {"database": "service_healthy"},
        "appliance": checked,
        "provision": {front: "service_healthy", "appliance": "service_started"},
    }
    for name in ("database", front, "provision"):
        assert services(front)[name]["healthcheck"]["test"], name


@pytest.mark.parametrize("front", FRONTS)
def test_secrets_are_files_that_are_checked_and_known(front: str) -> None:
    document = read(f"{front}.yaml")
    assert {name: each["file"] for name, each in document["secrets"].items()} == {
        name: f"/secrets/{name}" for name in document["secrets"]
    }
    assert set(document["secrets"]) <= set(RULES)
    used = {each["source"] for service in services(front).values() for each in service.get("secrets", ())}
    checked = {each["source"] for each in services(front)["check"]["secrets"]}
    assert used == checked == set(document["secrets"])
    for name, service in services(front).items():
        of_a_file = {key for key in service.get("environment", {}) if "PASSWORD" in key or "SECRET" in key}
        assert all(key.endswith("_FILE") for key in of_a_file), name


@pytest.mark.parametrize("front", FRONTS)
def test_the_appliance_is_that_of_the_one_box_file(front: str) -> None:
    alone = read("appliance.yaml")["services"]["appliance"]
    here = services(front)["appliance"]
    assert here["environment"] == alone["environment"]
    differs = {name for name in alone | here if alone.get(name) != here.get(name)}
    assert differs == {"ports", "depends_on"}


@pytest.mark.parametrize("front", FRONTS)
def test_the_fronts_secrets_reach_it_as_variables_that_nobody_else_sees(front: str, tmp_path: Path) -> None:
    """The front's own shell line runs, with `env` in place of its program."""
    make_secrets(tmp_path)
    shell, flags, script = services(front)[front]["entrypoint"]
    script = script.replace("$$", "$")  # `config` writes it as it would have to be read again
    program = f"exec /{front} --port 3000 --log-dir ''"
    assert program in script
    script = script.replace(program, "exec env").replace("/run/secrets", str(tmp_path))
    done = subprocess.run([shell, flags, script], capture_output=True, text=True, check=True, env={"PATH": "/bin"})
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines())
    password = (tmp_path / "database_password").read_text().strip()
    assert variables["SESSION_SECRET"] == (tmp_path / "session_secret").read_text().strip()
    if front == "one-api":
        assert variables["SQL_DSN"] == f"oneapi:{password}@tcp(database:3306)/oneapi"
        assert variables["INITIAL_ROOT_ACCESS_TOKEN"] == (tmp_path / "access_token").read_text().strip()
    else:
        assert variables["SQL_DSN"] == f"postgresql://newapi:{password}@database:5432/newapi"


@pytest.mark.parametrize("front", FRONTS)
def test_provision_knows_its_flags_and_finds_what_they_name(front: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    service = services(front)["provision"]
    options = parser.parse_args(service["command"])
    assert options.follow
    assert options.one_api == f"http://{front}:3000"
    targets = {volume["target"]: volume for volume in service["volumes"]}
    assert targets["/appliance"]["read_only"] is True
    assert (options.key_file, options.token_file) == (Path("/appliance/secrets/api_key"), Path("/data/token"))
    given = {path for path in (options.access_token_file, options.root_password_file) if path}
    assert given == {Path("/run/secrets") / each["source"] for each in service["secrets"]}
    assert service["healthcheck"]["test"] == ["CMD", "test", "-f", str(options.ready_file)]
    checks = services(front)["check"]["command"]
    assert (parser.parse_args(checks).action, parser.parse_args(checks).folder) == ("check", "/run/secrets")


def test_the_one_box_file_needs_no_other_file_and_no_build(tmp_path: Path) -> None:
    """A stranger feeds it on stdin, in an empty folder; the GPUs' file lies over it by another descriptor."""
    one, gpus = (str(ROOT / "compose" / name) for name in ("appliance.yaml", "gpu.yaml"))
    lines = {
        f"cat {one} | docker compose -f - config --format json": False,
        f"docker compose -f <(cat {one}) -f <(cat {gpus}) config --format json": True,
    }
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    for line, has_gpus in lines.items():
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        service = document["services"]["appliance"]
        assert document["name"] == "appliance"
        assert not {"build", "env_file"} & set(service)
        assert all(volume["type"] == "volume" for volume in service["volumes"])
        assert "secrets" not in document
        assert ("deploy" in service) is has_gpus
    assert list(tmp_path.iterdir()) == []


def test_a_compose_that_knows_no_provider_says_so_in_its_own_words() -> None:
    done = compose(*files("app.yaml"), "config")
    if done.returncode == 0:
        pytest.skip("this Compose knows providers: tests/container/test_compose_line.py starts one")
    assert "services.llm Additional property provider is not allowed" in done.stderr


def test_an_app_names_its_model_in_three_lines() -> None:
    services = yaml.safe_load((ROOT / "compose/app.yaml").read_text())["services"]
    provider = services["llm"]["provider"]
    assert (provider["type"], provider["options"]) == ("appliance", {"model": "${APPLIANCE_MODEL:-qwen}"})
    assert services["app"]["depends_on"] == ["llm"]


# Replicas


def test_replicas_are_the_one_box_appliance_on_one_volume_and_only_the_router_is_published() -> None:
    alone = read("appliance.yaml")["services"]["appliance"]
    found = services("replicas")
    for name in REPLICAS:
        here = found[name]
        assert {key for key in alone | here if alone.get(key) != here.get(key)} == {"ports"}
        assert [(each["source"], each["target"]) for each in here["volumes"]] == [("data", "/data")]
    published = {name: service["ports"] for name, service in found.items() if service.get("ports")}
    assert set(published) == {"router"}
    (port,) = published["router"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "11435", 30000)


def test_the_router_is_hardened_knows_each_replica_and_waits_for_long_prompts() -> None:
    router = services("replicas")["router"]
    assert (router["user"], router["read_only"], router["cap_drop"]) == ("1000:0", True, ["ALL"])
    assert router["security_opt"] == ["no-new-privileges:true"]
    assert not router.get("volumes")
    flags = dict(
        word.removeprefix("--").split("=") for word in router["command"] if word.startswith("--") and "=" in word
    )
    urls = [word for word in router["command"] if word.startswith("http://")]
    assert urls == [f"http://{name}:11435" for name in REPLICAS]
    assert int(flags["request-timeout-secs"]) >= 3600
    assert (flags["policy"], flags["health-check-endpoint"]) == ("cache_aware", "/health/ready")
    assert (flags["host"], flags["port"], flags["prometheus-host"]) == ("0.0.0.0", "30000", "127.0.0.1")


def test_each_replica_gets_the_cpus_or_the_gpu_that_are_its_own() -> None:
    given = {"APPLIANCE_1_CPUS": "0-3", "APPLIANCE_2_CPUS": "4-7", "APPLIANCE_1_GPU": "GPU-1a", "APPLIANCE_2_GPU": "3"}
    done = compose(*files("replicas.yaml", "replicas-gpu.yaml"), "config", "--format", "json", **given)
    found = json.loads(done.stdout)["services"]
    assert [found[name]["cpuset"] for name in REPLICAS] == ["0-3", "4-7"]
    devices = [found[name]["deploy"]["resources"]["reservations"]["devices"][0] for name in REPLICAS]
    assert [device["device_ids"] for device in devices] == [["GPU-1a"], ["3"]]
    assert "cpuset" not in read("replicas.yaml")["services"]["appliance-1"]  # all CPUs where none are named


def test_the_development_file_runs_the_working_tree_and_stays_as_hardened() -> None:
    alone = read("appliance.yaml")["services"]["appliance"]
    here = read("appliance.yaml", "dev.yaml")["services"]["appliance"]
    assert {key for key in alone | here if alone.get(key) != here.get(key)} == {"volumes", "environment"}
    (tree,) = [each for each in here["volumes"] if each["type"] == "bind"]
    assert (tree["source"], tree["read_only"]) == (str(ROOT / "appliance"), True)
    assert tree["target"] == "/opt/appliance/lib/appliance"
    differs = {key for key in here["environment"] if here["environment"][key] != alone["environment"][key]}
    assert differs == {"APPLIANCE_TUNE", "APPLIANCE_DRAIN_S"}


@pytest.mark.parametrize("front", FRONTS)
def test_the_files_say_what_was_not_run(front: str) -> None:
    head = (ROOT / f"compose/{front}.yaml").read_text().partition("\nname:")[0]
    assert f"# NOT RUN against the real {front}" in head
