from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import appliance
from appliance.errors import DriverTooOldError, FatalError, GpuUnusableError, NoKernelError
from appliance.image_facts import CUDA_CHIPS, TEGRA, ImageFacts, runs_on
from appliance.probe import Gpu, GpuProbe, Hardware
from appliance.settings import Settings
from appliance.start.checks import check_devices, check_supported, tags_for, usable_gpus, why_fewer
from images.matrix import compat
from images.matrix.matrix import load
from tests.builders import IMAGE, card, machine

AUTO = Settings()
VARIANTS = ("x64", "haswell", "zen4", "armv8.0_1", "armv8.2_2")
CUDA_IMAGE = replace(
    IMAGE,
    cell="llama-cu130-sm86",
    cuda="13.0",
    sm=("86",),
    driver_floor_sass="580",
    driver_floor_ptx="580.65.06",
    cpu_variants=VARIANTS,
)


def gpu(sm: str | None = "86", index: int = 0, name: str = "Test 9000") -> Gpu:
    return card(index, sm=sm, name=name)


def given(
    *gpus: Gpu, driver: str | None = "580.82.07", cuda: str | None = "13.0", problem: str | None = None
) -> Hardware:
    found = GpuProbe(gpus=gpus, driver=driver, cuda_driver=cuda, problem=problem)
    return replace(machine(), gpu_requested=True, gpus=found)


def api_error(image: ImageFacts, hardware: Hardware) -> FatalError:
    with pytest.raises(FatalError) as caught:
        check_supported(AUTO, image, hardware)
    return caught.value


def test_the_rule_of_machine_code_is_the_one_that_images_are_built_by() -> None:
    known = compat.facts()
    assert {sm.sm for sm in known.sms.values() if sm.tegra} == TEGRA
    forms = {form for release in known.releases.values() for form in release.forms}
    assert len(forms) > 20
    for form in forms | set(known.sms):
        for sm in known.sms:
            assert runs_on(form, sm) == compat.runs_on(form, sm), (form, sm)


@pytest.mark.parametrize(
    ("form", "sm", "runs"),
    [("80", "86", True), ("86", "80", False), ("90a", "90", True), ("90a", "100", False), ("120f", "121", True),
     ("80", "87", False), ("87", "89", False), ("110", "110", True), ("90", "100", False)],
)  # fmt: skip
def test_machine_code_runs_where_nvidia_says_so(form: str, sm: str, runs: bool) -> None:
    assert runs_on(form, sm) is runs


def test_what_fits_is_nothing_to_warn_of() -> None:
    hardware = given(gpu())
    assert check_supported(AUTO, CUDA_IMAGE, hardware) == ()
    newer_minor = given(gpu("89"))
    assert check_supported(AUTO, CUDA_IMAGE, newer_minor) == ()


def test_a_gpu_without_kernels_is_20_and_names_the_tag_that_has_them() -> None:
    error = api_error(CUDA_IMAGE, given(gpu("75", name="RTX 2080 Ti")))
    assert isinstance(error, NoKernelError)
    assert "RTX 2080 Ti (SM 75)" in error.message
    assert "kernels for SM 86" in error.message
    assert "llama-cu130-sm75" in (error.hint or "")
    assert "images select --driver 580.82.07 --sm 75" in (error.hint or "")


def test_only_tags_that_the_matrix_can_build_are_named() -> None:
    built = {cell.id for cell in load(Path(appliance.__file__).parents[1]).cells}
    named = {
        tag
        for sm in ("61", "70", *" ".join(CUDA_CHIPS.values()).split())
        for tag in tags_for(replace(CUDA_IMAGE, cuda=None), sm)
    }
    assert named == {cell for cell in built if re.fullmatch(r"llama-cu\d+-sm\d+", cell)}
    assert tags_for(replace(CUDA_IMAGE, cuda="12.8"), "120") == ("llama-cu128-sm120",)
    assert tags_for(replace(CUDA_IMAGE, cuda="12.4"), "121")[0] == "llama-cu134-sm121"  # 12.4 has none
    for stranger in ("61", "999"):
        hint = api_error(CUDA_IMAGE, given(gpu(stranger, name="Tesla P40"))).hint or ""
        assert "use the image" not in hint
        assert f"--sm {stranger}` says which there is, or why there is none" in hint


def test_of_several_gpus_those_without_kernels_are_left_out_with_a_reason() -> None:
    hardware = given(gpu("75", 0, "old"), gpu("86", 1), gpu("89", 2))
    warnings = check_supported(AUTO, CUDA_IMAGE, hardware)
    assert warnings == ("old (SM 75) is left out: llama-cu130-sm86 has kernels for SM 86",)
    assert [each.index for each in usable_gpus(CUDA_IMAGE, hardware)] == [1, 2]
    assert why_fewer(CUDA_IMAGE, hardware, ("CUDA0", "CUDA1")) is None


def test_a_chip_that_is_not_told_is_not_judged() -> None:
    hardware = given(gpu(None))
    assert check_supported(AUTO, CUDA_IMAGE, hardware) == ()


@pytest.mark.parametrize(("driver", "is_old"), [("575.57.08", True), ("579.99", True), ("580", False), (None, False)])
def test_a_driver_below_the_floor_is_21(driver: str | None, is_old: bool) -> None:
    hardware = given(gpu(), driver=driver, cuda="12.9")
    if not is_old:
        assert check_supported(AUTO, CUDA_IMAGE, hardware) == ()
        return
    error = api_error(CUDA_IMAGE, hardware)
    assert isinstance(error, DriverTooOldError)
    assert f"{driver}, llama-cu130-sm86 needs 580 or newer" in error.message
    assert f"images select --driver {driver} --sm 86" in (error.hint or "")
    assert "runs CUDA 12.9" in (error.hint or "")


def test_a_driver_too_old_is_said_before_kernels_that_are_missing() -> None:
    assert isinstance(api_error(CUDA_IMAGE, given(gpu("75"), driver="470.1")), DriverTooOldError)


def test_devices_that_a_variable_hides_are_named_as_the_cause() -> None:
    hidden = replace(given().gpus, warnings=("CUDA_VISIBLE_DEVICES=9 leaves 0 of 1 devices",))
    error = api_error(CUDA_IMAGE, replace(given(), gpus=hidden))
    assert isinstance(error, GpuUnusableError)
    assert "lists no device; CUDA_VISIBLE_DEVICES=9 leaves 0 of 1 devices" in error.message
    assert "CUDA_VISIBLE_DEVICES" in (error.hint or "")


@pytest.mark.parametrize(
    ("hardware", "cause", "remedy"),
    [
        (given(driver=None, cuda=None), "libnvidia-ml.so.1 is not in this container", "Container Toolkit"),
        (given(), "driver 580.82.07 lists no device", "nvidia-smi -L"),
        (given(problem="NVML did not answer within 15 s: the driver hangs"), "the driver hangs", "Xid"),
        (given(problem="NVML: RM has detected an NVML/RM version mismatch"), "version mismatch", "reboot"),
        (
            given(problem="the NVML child ended with -6: it printed nothing"),
            "ended with -6",
            "`nvidia-smi` on the host",
        ),
        (given(problem="…: start the container with --gpus all"), "--gpus all", "--gpus all"),
    ],
)
def test_a_gpu_that_was_given_and_cannot_be_used_is_23_with_its_cause(
    hardware: Hardware, cause: str, remedy: str
) -> None:
    error = api_error(CUDA_IMAGE, hardware)
    assert isinstance(error, GpuUnusableError)
    assert cause in error.message
    assert remedy in (error.hint or "")


def test_a_cuda_image_without_a_gpu_is_warned_of_and_its_engine_decides() -> None:
    (warning,) = check_supported(AUTO, CUDA_IMAGE, machine())
    assert "only the CPU is left" in warning
    assert "serving" not in warning


@pytest.mark.parametrize(
    ("gpus", "seen"),
    [
        (GpuProbe(gpus=(gpu("90"),)), r"Test 9000 \(SM 90\)"),
        (GpuProbe(problem="libnvidia-ml is not there"), "libnvidia-ml is not there"),
        (GpuProbe(), "a GPU"),
    ],
)
def test_a_gpu_given_to_an_image_without_kernels_is_23_and_never_the_cpu_in_silence(gpus: GpuProbe, seen: str) -> None:
    with pytest.raises(GpuUnusableError, match=f"no GPU kernels: llama-cpu, given {seen}") as caught:
        check_supported(AUTO, IMAGE, replace(machine(), gpu_requested=True, gpus=gpus))
    assert caught.value.exit_code == 23
    assert "without --gpus" in (caught.value.hint or "")


def test_a_gpu_that_nobody_gave_is_no_reason() -> None:
    hardware = replace(machine(), gpus=GpuProbe(gpus=(gpu(),)))
    assert check_supported(AUTO, IMAGE, hardware) == ()


def test_who_asks_for_no_gpu_is_not_refused_for_one() -> None:
    broken = given(gpu("75"), driver="470.1", problem="hangs")
    assert check_supported(replace(AUTO, devices="none"), CUDA_IMAGE, broken) == ()
    assert check_supported(replace(AUTO, devices="none"), IMAGE, broken) == ()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("CUDA driver version is insufficient for CUDA runtime version", "580.82.07; update it"),
        ("libcuda.so.1: cannot open shared object file", "compute,utility"),
        ("no CUDA-capable device is detected", "CUDA_VISIBLE_DEVICES"),
        ("", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_an_engine_that_sees_no_gpu_is_23(said: str, remedy: str) -> None:
    with pytest.raises(GpuUnusableError, match="the engine sees no GPU, and NVML sees Test 9000") as caught:
        check_devices(CUDA_IMAGE, given(gpu()), (), said)
    assert (said or "does not say why") in caught.value.message
    assert remedy in (caught.value.hint or "")
    check_devices(CUDA_IMAGE, given(gpu()), ("CUDA0",), said)
    check_devices(IMAGE, machine(), (), said)


def test_an_engine_that_sees_some_of_the_gpus_is_said() -> None:
    two = given(gpu(index=0), gpu(index=1))
    assert why_fewer(CUDA_IMAGE, two, ("CUDA0", "CUDA1")) is None
    assert (why_fewer(CUDA_IMAGE, two, ("CUDA0",)) or "").startswith("the engine sees 1 of 2 GPUs: CUDA0 of Test 9000")
    slices = given(replace(gpu(), mig_profile="1g.10gb"), replace(gpu(index=0), mig_profile="1g.10gb"))
    assert why_fewer(CUDA_IMAGE, slices, ("CUDA0",)) is None


LOST = replace(gpu(None, 1, ""), name=None, vram_total_mib=None, vram_free_mib=None,
               problem="does not answer: NVML: GPU is lost (15)")  # fmt: skip


def test_a_card_in_trouble_is_left_out_by_its_index_with_what_to_do() -> None:
    hardware = given(gpu(), LOST)
    (warning,) = check_supported(AUTO, CUDA_IMAGE, hardware)
    assert warning.startswith("GPU 1 does not answer: NVML: GPU is lost (15); it is left out; look for Xid in `dmesg`")
    assert [each.index for each in usable_gpus(CUDA_IMAGE, hardware)] == [0]
    assert why_fewer(CUDA_IMAGE, hardware, ("CUDA0",)) is None
    refused = replace(LOST, problem="does not answer: NVML: Insufficient Permissions (4)")
    assert "NVIDIA_VISIBLE_DEVICES" in check_supported(AUTO, CUDA_IMAGE, given(gpu(), refused))[0]


def test_where_only_cards_in_trouble_are_left_it_is_23_with_each_of_them() -> None:
    error = api_error(CUDA_IMAGE, given(LOST, gpu("75", 0, "old")))
    assert isinstance(error, GpuUnusableError)
    assert "GPU 1 does not answer" in error.message
    assert "old (SM 75) is left out" in error.message
    assert "--devices none" in (error.hint or "")
