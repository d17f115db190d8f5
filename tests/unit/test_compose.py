"""compose/appliance.yaml and the Makefile against what they must agree with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.settings import SETTINGS

ROOT = Path(__file__).parents[2]
# Where things are inside the container is the image's business; compose itself maps the volume and the port.
HUB_VARIABLES = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN")
INSIDE = {"data_dir", "engine_dir", "facts_dir", "runtime_dir", "host", "port"}


@pytest.fixture
def service() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "compose/appliance.yaml").read_text())
    service: dict[str, Any] = document["services"]["appliance"]
    return service


def test_every_setting_is_passed_through_and_empty_without_a_value(service: dict[str, Any]) -> None:
    variables = [setting.variable for name, setting in SETTINGS.items() if name not in INSIDE]
    wanted = {variable: f"${{{variable}:-}}" for variable in variables} | {
        "APPLIANCE_DRAIN_S": "${APPLIANCE_DRAIN_S:-30}"
    }
    wanted |= {variable: f"${{{variable}:-}}" for variable in HUB_VARIABLES}
    assert service["environment"] == wanted
    assert list(service["environment"]) == [*variables, *HUB_VARIABLES]  # in the order in which --help shows them


def test_it_is_hardened(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def recipe(target: str, *variables: str) -> str:
    argv = ["make", "--dry-run", "--always-make", target, *variables]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def test_up_lets_compose_make_the_volume_and_announces_the_models_sha256() -> None:
    said = recipe("up", "APPLIANCE_PROJECT=p1", "APPLIANCE_VOLUME=v1")
    assert "docker volume create" not in said
    assert "models list" not in said  # a file of that name may be what an interrupted copy left
    compose = r"APPLIANCE_VOLUME=v1 docker compose --project-name p1 -f compose/appliance.yaml"
    assert re.search(compose + r" run --rm -T --no-deps appliance models add \S+ --sha256 ", said)
    assert "label=com.docker.compose.oneoff=False" in said


def test_a_cuda_cell_is_given_the_gpus_and_the_cpu_image_is_not() -> None:
    """`make -n`, for what compose would read."""

    def files(cell: str) -> set[str]:
        done = subprocess.run(
            ["make", "-n", "down", f"CELL={cell}"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        return set(re.findall(r"-f (\S+)", done.stdout))

    assert files("llama-cpu") == {"compose/appliance.yaml"}
    assert files("llama-cu130-sm90") == {"compose/appliance.yaml", "compose/gpu.yaml"}
    devices = yaml.safe_load((ROOT / "compose/gpu.yaml").read_text())["services"]["appliance"]["deploy"]
    assert devices["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    ]
