"""The cell that an installed command chooses, against `images select`, which weighs the same facts in a clone."""

from __future__ import annotations

import itertools

import pytest

from appliance.errors import ConfigError, DriverTooOldError, FatalError, NoKernelError
from appliance.host.docker.choose import choose
from appliance.host.docker.gpus import HostGpu
from appliance.host.docker.inventory import CLONE, load_inventory
from images.choice import select
from images.choice.gpus import Gpu
from images.errors import MatrixError
from images.matrix import compat, matrix

INVENTORY = load_inventory()
assert INVENTORY
CHOICES = INVENTORY.choices
MATRIX = matrix.load(CLONE)
DRIVERS = ("470.256.02", "525.60.13", "550.54.14", "570.124.06", "575.51.03", "580.65.06", "595.1", "610.2")
MACHINES = [
    *((sm,) for sm in compat.facts().sms),
    *itertools.combinations(("75", "86", "89", "120"), 2),
    ("86", "86", "120"),
]


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
@pytest.mark.parametrize("sms", MACHINES, ids="+".join)
def test_the_choice_is_that_of_images_select(sms: tuple[str, ...], platform: matrix.Platform) -> None:
    for driver in DRIVERS:
        gpus = [HostGpu(name=f"SM {sm}", driver=driver, sm=sm) for sm in sms]
        machine = select.Machine(
            platform=platform, gpus=tuple(Gpu(name=gpu.name, sm=gpu.sm or "") for gpu in gpus), driver=driver
        )
        try:
            wanted = select.choose(MATRIX, machine).cell
        except MatrixError:
            with pytest.raises((NoKernelError, DriverTooOldError)):
                choose(CHOICES, gpus, platform)
        else:
            assert choose(CHOICES, gpus, platform).cell == wanted, driver


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_without_a_gpu_it_is_the_cpus(platform: str) -> None:
    assert choose(CHOICES, (), platform).cell == "llama-cpu"


def test_only_what_is_published_is_chosen() -> None:
    few = [each for each in CHOICES if each.cell in ("llama-cpu", "llama-cu130-sm86")]
    rtx = HostGpu(name="RTX 4090", driver="580.95.05", sm="89")
    assert choose(few, [rtx], "linux/amd64").cell == "llama-cu130-sm86"


@pytest.mark.parametrize(
    ("gpu", "kind", "code", "said"),
    [
        (HostGpu(name="H100", driver="580.95", sm="90"), NoKernelError, 20, "for this machine's GPU: H100 (sm_90)"),
        (HostGpu(name="RTX 4090", driver="560.1", sm="89"), DriverTooOldError, 21, "560.1, RTX 4090 needs 580"),
        (HostGpu(name="Tesla T4", driver="470.1", sm=None), DriverTooOldError, 21, "470.1, Tesla T4 needs 580"),
    ],
)  # fmt: skip
def test_a_gpu_that_nothing_serves_is_never_replaced_by_the_cpu(
    gpu: HostGpu, kind: type[FatalError], code: int, said: str
) -> None:
    few = [each for each in CHOICES if each.cell in ("llama-cpu", "llama-cu130-sm86")]
    with pytest.raises(kind) as caught:
        choose(few, [gpu], "linux/amd64")
    assert caught.value.exit_code == code
    assert said in caught.value.message
    assert "--cpu" in (caught.value.hint or "")


def test_a_platform_without_an_image_is_said() -> None:
    with pytest.raises(ConfigError, match="no image for the CPU is published for this platform: linux/riscv64"):
        choose(CHOICES, (), "linux/riscv64")
