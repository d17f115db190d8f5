"""compose/appliance.yaml and the Makefile against what they must agree with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.host.docker.inventory import load_inventory
from appliance.settings import SETTINGS

ROOT = Path(__file__).parents[2]
# Where things are inside the container is the image's business; compose itself maps the volume and the port.
HUB_VARIABLES = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN")
INSIDE = {"data_dir", "engine_dir", "facts_dir", "runtime_dir", "host", "port"}
# For one machine: in the network that compose makes no other host reaches the engine.
OF_SEVERAL_HOSTS = {"nodes", "node_rank", "leader"}


@pytest.fixture
def service() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "compose/appliance.yaml").read_text())
    service: dict[str, Any] = document["services"]["appliance"]
    return service


def test_every_setting_is_passed_through_and_empty_without_a_value(service: dict[str, Any]) -> None:
    variables = [setting.variable for name, setting in SETTINGS.items() if name not in INSIDE | OF_SEVERAL_HOSTS]
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


def test_the_default_image_is_the_published_one_once_there_is_one(service: dict[str, Any]) -> None:
    """Until then it is the name that `make up` gives: on a public registry nobody has it."""
    inventory = load_inventory()
    row = inventory.published_image("llama-cpu", "qwen") if inventory else None
    wanted = f"{row.image}@{row.digest}" if row else "appliance:llama-cpu"
    assert service["image"] == f"${{APPLIANCE_IMAGE:-{wanted}}}"


def test_a_cuda_cell_is_given_the_gpus_and_the_cpu_image_is_not() -> None:
    """`make -n` prints what compose would read."""

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
