"""Check that engine, NVML and nvidia-smi see the same GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.console.report import Report
from appliance.probe import Hardware
from appliance.start.checks import check_devices, why_fewer
from appliance.start.inputs import StartInputs
from appliance.system.detached import detached


def check_gpus(start: StartInputs, report: Report) -> None:
    """Warn of what is odd about the machine, and ask the engine for its GPUs: it is started once for that.

    Raises GpuUnusableError (23) if the engine sees none although there is one.
    """
    image, hardware = start.inputs.image, start.inputs.hardware
    for words in (*hardware.gpus.warnings, *start.warnings):
        report.warning("hardware", words)
    if image.cuda is None or not hardware.gpus.gpus or start.settings.devices == "none":
        return
    variant = start.inputs.kernels.variant
    devices = start.engine.query_devices(start.install, hardware, cpu_variant=variant, may_recall=True)
    check_devices(image, hardware, devices.names, devices.said)
    if fewer := why_fewer(image, hardware, devices.names):
        report.warning("hardware", fewer)


async def cross_check_gpus(hardware: Hardware, environment: Mapping[str, str], report: Report) -> None:
    """Warn if nvidia-smi contradicts NVML. It may take seconds, so a start from a profile does not ask it."""
    from appliance.probe.gpu.smi import cross_check  # here, since a start from a profile never needs its XML parser

    found = await detached(cross_check, hardware.gpus, environment, hardware.volume.path)
    for words in found.warnings[len(hardware.gpus.warnings) :]:
        report.warning("hardware", words)
