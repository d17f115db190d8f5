from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.doctor.bundle import HIDDEN, bundle, write_bundle
from appliance.doctor.check import Check, failed, passed, warned
from appliance.doctor.examine import Findings
from appliance.doctor.gpu import gpu_checks
from appliance.doctor.host import host_checks
from appliance.doctor.keys import key_check, named_keys_check
from appliance.doctor.other_work import other_work_check
from appliance.doctor.parts import port_check, volume_check
from appliance.doctor.show import as_json, show
from appliance.engines.engine import Devices
from appliance.engines.llama.planning.hardware.cpu_variant import choose_kernels
from appliance.engines.llama.process.devices import parse_devices, parse_kept
from appliance.errors import ConfigError, CpuUnsupportedError, NoKernelError
from appliance.gateway.accounts.named_keys import add_key
from appliance.plan import RuledOut
from appliance.probe import CoreGroup, Gpu, GpuHolder, GpuProbe, Hardware
from appliance.probe.load.load import LoadSample
from appliance.settings import Settings, resolve_settings
from tests.builders import ENGINE, IMAGE, card, machine, with_variants
from tests.ports import free_port
from tests.unit.probe.machine import fake_network

CUDA_IMAGE = replace(IMAGE, cell="llama-cu130-sm86", cuda="13.0", sm=("86",), driver_floor_sass="580")
CARD = card()


def fake_root(folder: Path, *, swap: tuple[int, int] = (0, 0), huge: str = "always [madvise] never") -> Path:
    (folder / "proc").mkdir(parents=True)
    (folder / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (folder / "dev/shm").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"SwapTotal: {swap[0]} kB\nSwapFree: {swap[1]} kB\n")
    (folder / "sys/kernel/mm/transparent_hugepage/enabled").write_text(huge)
    return folder


def host(root: Path, hardware: Hardware, settings: Settings | None = None) -> dict[str, Check]:
    return {check.name: check for check in host_checks(root, settings or Settings(), hardware, None)}


LIBCUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"


def with_gpus(*gpus: Gpu, driver: str = "580.82.07", warnings: tuple[str, ...] = ()) -> Hardware:
    found = GpuProbe(gpus=gpus, driver=driver, cuda_driver="13.0", warnings=warnings, libcuda=LIBCUDA)
    return replace(machine(), gpu_requested=True, gpus=found)


def gpu(hardware: Hardware, devices: Devices | None = None) -> dict[str, Check]:
    answer = devices or Devices(names=("CUDA0",))
    return {check.name: check for check in gpu_checks(Settings(), CUDA_IMAGE, hardware, lambda: answer)}


def test_a_machine_in_order_passes_every_check(tmp_path: Path) -> None:
    checks = host(fake_root(tmp_path / "root"), machine())
    assert {check.status for check in checks.values()} == {"pass"}
    assert set(checks) == {"cpu", "cpu limit", "memory", "memlock", "shared memory", "swap", "huge pages"}
    assert all(check.remedy is None and check.exit_code == 0 for check in checks.values())


@pytest.mark.parametrize(
    ("name", "hardware", "settings", "remedy"),
    [
        ("cpu limit", machine(quota=0.5), Settings(), "--cpus"),
        ("memory", machine(total_mib=1000), Settings(), "--memory"),
        ("memory", machine(limit_mib=512), Settings(), "--memory"),
        ("memlock", machine(), Settings(load_mode="mmap+mlock"), "memlock=-1"),
    ],
)
def test_what_is_short_is_a_warning_with_a_remedy(
    tmp_path: Path, name: str, hardware: Hardware, settings: Settings, remedy: str
) -> None:
    check = host(fake_root(tmp_path / "root"), hardware, settings)[name]
    assert (check.status, check.exit_code) == ("warn", 0)
    assert remedy in (check.remedy or "")


def test_kinds_of_cores_and_what_hides_them_are_shown(tmp_path: Path) -> None:
    root, cpu = fake_root(tmp_path / "root"), machine().cpu
    groups = (CoreGroup(capacity=1.0, cores=4), CoreGroup(capacity=0.27, cores=4))
    unequal = host(root, replace(machine(), cpu=replace(cpu, groups=groups)))["cpu limit"]
    assert "(4 of 100%, 4 of 27% of the fastest's speed), no quota" in unequal.value
    unknown = host(root, replace(machine(), cpu=replace(cpu, groups_problem="cpu_capacity of CPU 1 is '0'")))
    assert "assumed equal (cpu_capacity of CPU 1 is '0')" in unknown["cpu limit"].value


def test_swapping_and_huge_pages_that_are_off_are_warned_of(tmp_path: Path) -> None:
    root = fake_root(tmp_path / "root", swap=(8 * 2**20, 4 * 2**20), huge="always madvise [never]")
    checks = host(root, machine())
    assert (checks["swap"].status, checks["swap"].value) == ("warn", "4,096 MiB used of 8,192")
    assert checks["huge pages"].status == "warn"


def test_what_the_kernel_does_not_tell_is_unknown_and_no_fault(tmp_path: Path) -> None:
    checks = host(tmp_path, machine())
    assert (checks["swap"].value, checks["huge pages"].value) == ("unknown", "unknown")
    assert checks["shared memory"].status == "warn"


def test_a_cpu_that_the_kernels_cannot_run_on_fails_with_22(tmp_path: Path) -> None:
    root = fake_root(tmp_path / "root")
    with pytest.raises(CpuUnsupportedError) as caught:
        choose_kernels(Settings(), with_variants("haswell"), machine().cpu)
    checks = list(host_checks(root, Settings(), machine(), caught.value))
    assert [(check.name, check.exit_code) for check in checks if check.status == "fail"] == [("cpu", 22)]


def test_variants_that_are_ruled_out_are_warned_of(tmp_path: Path) -> None:
    root, out = fake_root(tmp_path / "root"), RuledOut(seen={"zen4": "it died"}, where="/data/cache/b1/x.json")
    kernels = choose_kernels(Settings(), with_variants("x64"), machine().cpu, out)
    (check, *_) = host_checks(root, Settings(), machine(), kernels, out)
    assert (check.name, check.status) == ("cpu", "warn")
    assert check.value.endswith("kernels: x64; ruled out: zen4: it died")
    assert "remove /data/cache/b1/x.json" in (check.remedy or "")


def test_a_gpu_in_order_passes_and_shows_what_it_is() -> None:
    checks = gpu(with_gpus(CARD))
    assert {check.status for check in checks.values()} == {"pass"}
    assert checks["gpu"].value == "the engine sees CUDA0"
    assert checks["driver"].value == "580.82.07, runs CUDA up to 13.0; needed: 580"
    assert "24,000 MiB free of 24,576, 936 GB/s by memory clock" in checks["gpu 0"].value


@pytest.mark.parametrize(
    ("name", "card", "remedy"),
    [
        ("gpu 0 link", replace(CARD, pcie_generation=1), "an idle card lowers its link speed"),
        ("gpu 0 link", replace(CARD, pcie_width=4), "another slot"),
        ("gpu 0 power", replace(CARD, power_limit_w=200.0), "-pl 350"),
        ("gpu 0 display", replace(CARD, display=True), "move the desktop"),
        (
            "gpu 0 in use",
            replace(CARD, holders=(GpuHolder(pid=7, name="game", used_mib=900),)),
            "plans use only free memory",
        ),
    ],
)
def test_what_makes_a_gpu_slower_is_a_warning(name: str, card: Gpu, remedy: str) -> None:
    check = gpu(with_gpus(card))[name]
    assert check.status == "warn"
    assert remedy in (check.remedy or "")


def test_who_holds_memory_is_named() -> None:
    holders = (GpuHolder(pid=7, name="game", used_mib=900), GpuHolder(pid=8, name=None, used_mib=None))
    seen = gpu(with_gpus(replace(CARD, holders=holders)))["gpu 0 in use"].value
    assert seen == "game (pid 7): 900 MiB, a process (pid 8): an unknown amount"


def test_unknown_facts_of_a_gpu_are_said_to_be_unknown() -> None:
    bare = Gpu(index=0, name=None, uuid=None, sm=None, vram_total_mib=None, vram_free_mib=None, pci_bus_id=None)
    checks = gpu(with_gpus(bare))
    assert checks["gpu 0"].value == "unnamed, SM unknown, memory unknown, bandwidth unknown"
    assert set(checks) == {"driver", "driver library", "gpu", "gpu 0"}


def test_where_the_drivers_library_was_found_is_said() -> None:
    machine = with_gpus(CARD)
    assert gpu(machine)["driver library"].value == LIBCUDA
    folder = "/usr/local/nvidia/lib64"
    gke = replace(machine, gpus=replace(machine.gpus, libcuda=f"{folder}/libcuda.so.1", driver_dir=folder))
    assert "(GKE, and other nodes with Google's device plugin)" in gpu(gke)["driver library"].value
    none = gpu(replace(machine, gpus=replace(machine.gpus, libcuda=None)))["driver library"]
    assert none.status == "warn"
    assert "compute,utility" in (none.remedy or "")
    assert "LD_LIBRARY_PATH must name its folder" in (none.remedy or "")


def test_an_engine_that_sees_fewer_gpus_is_warned_of() -> None:
    assert gpu(with_gpus(CARD, replace(CARD, index=1)))["gpu"].status == "warn"


def test_readings_that_disagree_are_warnings() -> None:
    assert gpu(with_gpus(CARD, warnings=("NVML says 1, nvidia-smi says 2",)))["gpu readings"].status == "warn"


@pytest.mark.parametrize(
    ("hardware", "devices", "name", "code"),
    [
        (with_gpus(replace(CARD, sm="75")), None, "gpu", 20),
        (with_gpus(CARD, driver="470.1"), None, "driver", 21),
        (with_gpus(), None, "gpu", 23),
        (with_gpus(CARD), Devices(said="ggml_cuda_init: failed to initialize CUDA"), "gpu", 23),
    ],
)
def test_a_gpu_that_a_start_would_refuse_fails_with_its_code(
    hardware: Hardware, devices: Devices | None, name: str, code: int
) -> None:
    check = gpu(hardware, devices)[name]
    assert (check.status, check.exit_code) == ("fail", code)
    assert check.remedy


def test_the_engine_is_not_asked_where_it_could_not_answer() -> None:
    def never() -> Devices:
        pytest.fail("the engine was asked")

    list(gpu_checks(Settings(), IMAGE, machine(), never))
    list(gpu_checks(Settings(devices="none"), CUDA_IMAGE, with_gpus(CARD), never))
    list(gpu_checks(Settings(), CUDA_IMAGE, with_gpus(replace(CARD, sm="75")), never))
    list(gpu_checks(Settings(), None, with_gpus(CARD), never))


def test_the_engines_list_of_devices() -> None:
    text = "Available devices:\n  CUDA0: NVIDIA H200 (143167 MiB, 142566 MiB free)\n  CUDA1: (b) (1 MiB, 1 MiB free)\n"
    assert parse_devices(text) == ("CUDA0", "CUDA1")
    assert parse_devices("Available devices:\n  (none)\n") == ()
    assert parse_kept("CUDA0\nCUDA1\n") == ("CUDA0", "CUDA1")
    assert parse_kept("") == parse_kept("CUDA0\nCU") == parse_kept("rm -rf\n") == ()


def test_a_volume_that_is_not_there_fails_with_50(tmp_path: Path) -> None:
    check = volume_check(Settings(data_dir=tmp_path / "missing"), machine())
    assert (check.status, check.exit_code) == ("fail", 50)
    assert volume_check(Settings(data_dir=tmp_path), machine()).status == "warn"  # a folder, no mount


def test_the_key_is_never_shown(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert key_check(settings).value.startswith("none yet")
    settings.key_path.parent.mkdir()
    settings.key_path.write_text("sk-secret\n")
    settings.key_path.chmod(0o640)
    assert (key_check(settings).status, key_check(settings).value) == ("pass", "there is one")
    settings.key_path.chmod(0o644)
    assert key_check(settings).status == "warn"
    settings.key_path.write_bytes(b"\xff\xfe")
    assert key_check(settings).exit_code == 50
    assert key_check(replace(settings, auth=False)).status == "warn"


def with_named_keys(folder: Path, *names: str) -> Settings:
    settings = Settings(data_dir=folder)
    settings.named_keys_path.parent.mkdir()
    for name in names:
        add_key(settings.named_keys_path, name, {})
    return settings


def test_named_keys_are_counted_and_never_named(tmp_path: Path) -> None:
    assert (named_keys_check(Settings(data_dir=tmp_path)).status, named_keys_check(Settings()).value) == (
        "pass",
        "none",
    )
    settings = with_named_keys(tmp_path, "anna", "ci")
    add_key(settings.named_keys_path, "boss", {}, is_admin=True, until="2020-02-29")
    check = named_keys_check(settings)
    assert (check.status, check.value) == ("pass", "3 keys, 1 of administrators, 1 past the last day")
    assert named_keys_check(replace(settings, auth=False)).value == "not used: authentication is off"


@pytest.mark.parametrize(
    ("mode", "user", "groups", "remedy"),
    [
        (0o644, 0, {0}, "other users can read or change it: chmod 640"),
        (0o642, 0, {0}, "other users can read or change it: chmod 640"),
        (0o640, 1000, {1000}, "mode 0640, so this user may not be able to read it: chgrp 0"),
        (0o600, 1000, {0}, "mode 0600, so this user may not be able to read it: chgrp 0"),
        (0o640, 1000, {0, 1000}, None),
        (0o600, 0, {0}, None),
    ],
)
def test_who_may_read_the_named_keys(
    tmp_path: Path, mode: int, user: int, groups: set[int], remedy: str | None
) -> None:
    """Users and groups are those of the file plus a difference: a test may run as anybody."""
    settings = with_named_keys(tmp_path, "ci")
    settings.named_keys_path.chmod(mode)
    own = settings.named_keys_path.stat()
    check = named_keys_check(settings, own.st_uid + user, {own.st_gid + group for group in groups})
    assert (check.status, check.exit_code) == ("warn" if remedy else "pass", 0)
    assert (remedy or "") in (check.remedy or "")
    assert bool(check.remedy) == bool(remedy)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: b"{", "file of named keys is damaged"),
        (lambda row: json.dumps({"keys": [row, {**row, "sha256": "0" * 64}]}).encode(), "two keys have the same name"),
        (lambda row: json.dumps({"keys": [row, {**row, "name": "b"}]}).encode(), "two keys have the same sha256"),
        (lambda row: json.dumps({"keys": [{**row, "streams": 0}]}).encode(), "key 1 has an invalid streams"),
    ],
)
def test_a_damaged_file_of_named_keys_is_a_warning(
    tmp_path: Path, change: Callable[[dict[str, object]], bytes], says: str
) -> None:
    """A start goes on without them, so it is no failure."""
    settings = with_named_keys(tmp_path, "anna")
    (row,) = json.loads(settings.named_keys_path.read_text())["keys"]
    settings.named_keys_path.write_bytes(change(row))
    check = named_keys_check(settings)
    assert (check.status, check.exit_code) == ("warn", 0)
    assert says in check.value
    assert f"rm {settings.named_keys_path}" in (check.remedy or "")
    assert not {"anna", row["sha256"]} & {*check.value.split()}


def test_named_keys_that_cannot_be_read_tell_the_owner(tmp_path: Path) -> None:
    settings = with_named_keys(tmp_path)
    settings.named_keys_path.mkdir(mode=0o700)
    check = named_keys_check(settings)
    assert check.status == "warn"
    assert check.value.startswith(f"none is accepted: file of named keys cannot be read: {settings.named_keys_path}: ")
    assert f"(it belongs to {settings.named_keys_path.stat().st_uid}:" in check.value
    assert "mode 0700" in check.value
    assert check.remedy == "check owner and mode of the volume"


def test_a_port_that_another_program_has_fails_with_10(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        settings = Settings(host="127.0.0.1", port=listener.getsockname()[1], runtime_dir=tmp_path)
        taken = port_check(settings)
        assert (taken.status, taken.exit_code) == ("fail", 10)
        assert "another program uses it" in (taken.remedy or "")
    assert port_check(settings, tmp_path).status == "pass"


def test_a_loopback_that_only_this_container_reaches_is_a_warning(tmp_path: Path) -> None:
    settings = Settings(host="127.0.0.1", port=free_port(), runtime_dir=tmp_path)
    root = fake_network(tmp_path, {"lo": (1, 1), "eth0": (5, 6)})
    check = port_check(settings, root)
    assert (check.status, check.exit_code) == ("warn", 0)
    assert "only this container can reach 127.0.0.1" in check.value
    assert "APPLIANCE_HOST" in (check.remedy or "")
    assert port_check(replace(settings, host="0.0.0.0"), root).status == "pass"


CHECKS = (
    passed("one", "in order"),
    warned("two", "odd\nindeed", "mend it"),
    failed("three", NoKernelError("no", hint="use x")),
)


def found(*checks: Check, hardware: Hardware | None = None) -> Findings:
    return Findings(checks=checks, hardware=hardware or machine(), image=IMAGE, engine=ENGINE, plan=None)


def test_the_exit_code_is_the_first_failures() -> None:
    assert found(*CHECKS, failed("four", ConfigError("b"))).exit_code == 20
    assert found(*CHECKS[:2]).exit_code == 0
    assert json.loads(as_json(found(*CHECKS)))["exit_code"] == 20
    assert json.loads(as_json(found(*CHECKS)))["checks"][1]["remedy"] == "mend it"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("make", [io.StringIO, Terminal])
def test_people_see_status_value_and_remedy(make: Callable[[], io.StringIO]) -> None:
    stream = make()
    show(found(*CHECKS, passed("markup", "[bold]x[/bold]")), stream)
    text = stream.getvalue()
    for word in ("in order", "mend it", "use x", "[bold]x[/bold]", "2 passed, 1 warning, 1 failed", "end with 20"):
        assert word in text, word


SECRETS = (
    *("sk-PLANTED0123456789abcdef", "hf_PLANTED0123456789abcdef", "GPU-b0d5a1c2-1111-2222-3333-444455556666"),
    *("GPU-aaaaaaaa-1111-2222-3333-444455556666", "wintermute", "molly", "/home/molly", "/srv/acme corp", "acme corp"),
    *("192.168.7.9", "molly@example.org", "deadbeef-0000-1111-2222-333344445555", "shortkey", "secretgame", "projectx"),
)


def test_a_bundle_tells_nothing_about_who_sent_it() -> None:
    settings = resolve_settings(
        {"model": "/srv/acme corp/models/small.gguf"},
        {"APPLIANCE_HOST": "192.168.7.9", "APPLIANCE_ALIAS": "sk-PLANTED0123456789abcdef"},
        "data_dir: /home/molly/projectx/data\nengine_dir: /home/molly/llama\n",
        "/home/molly/projectx/data/appliance.yaml",
    )
    card = replace(
        CARD,
        mig_parent="GPU-aaaaaaaa-1111-2222-3333-444455556666",
        holders=(GpuHolder(pid=4711, name="secretgame", used_mib=900),),
    )
    hardware = with_gpus(card, warnings=("GPU-aaaaaaaa-1111-2222-3333-444455556666 of molly@example.org",))
    hardware = replace(hardware, volume=replace(hardware.volume, path=Path("/home/molly/projectx/data")))
    checks = (
        passed("volume", "/home/molly/projectx/data: writable on WinterMute"),
        passed("model", "/srv/acme corp/models/small.gguf, fetched with hf_PLANTED0123456789abcdef"),
        warned("gpu 0 in use", "secretgame (pid 4711): 900 MiB", "see /var/log/projectx/x.log, shortkey9"),
        warned("other", "deadbeef-0000-1111-2222-333344445555 at /mnt/projectx/y", "ask molly"),
    )
    text = bundle(settings, found(*checks, hardware=hardware), ["wintermute", "molly", ""], ["shortkey", ""])
    document = json.loads(text)
    for secret in SECRETS:
        assert secret.casefold() not in text.casefold(), secret
    assert document["hardware"]["gpus"]["gpus"][0]["uuid"] == HIDDEN
    assert document["hardware"]["gpus"]["gpus"][0]["holders"] == [{"used_mib": 900}]
    assert document["settings"]["model"] == {"value": "<folder>/small.gguf", "source": "flag --model"}
    assert document["settings"]["data_dir"]["value"] == "<data_dir>"
    assert document["checks"][0]["value"].startswith("<data_dir>: writable")
    assert document["hardware"]["cpu"]["cores"] == 4
    assert document["engine"]["build"] == 11312


def test_a_bundle_keeps_what_names_nobody() -> None:
    settings = resolve_settings({}, {})
    seen = "580.82.07 and /proc/meminfo, /sys/kernel/mm, 0.0.0.0:11435, 127.0.0.1, /data/models/small.gguf"
    document = json.loads(bundle(settings, found(passed("x", seen)), [], []))
    assert document["checks"][0]["value"] == seen.replace("/data/", "<data_dir>/")


def test_a_bundle_is_never_written_over_another_file(tmp_path: Path) -> None:
    write_bundle(tmp_path / "report.json", "a")
    with pytest.raises(ConfigError, match="bundle cannot be written") as caught:
        write_bundle(tmp_path / "report.json", "b")
    assert caught.value.exit_code == 10
    assert (tmp_path / "report.json").read_text() == "a"
    with pytest.raises(ConfigError, match="no such file"):
        write_bundle(tmp_path / "missing/report.json", "b")


def load(time_s: float, *, busy_s: float = 0.0, own_s: float = 0.0) -> LoadSample:
    return LoadSample(time_s=time_s, cpus=2, busy_s=busy_s, steal_s=0.0, own_s=own_s)


@pytest.mark.parametrize(
    ("after", "status", "words"),
    [
        (load(10.0, busy_s=18.0, own_s=2.0), "warn", "other programs took 80% of 2 CPUs (1.6 cores)"),
        (load(10.0, busy_s=18.0, own_s=18.0), "pass", "took 0% of 2 CPUs during this check"),
        (load(0.1, busy_s=0.2), "pass", "unknown"),  # too short a look
    ],
)
def test_other_work_on_the_cpus_is_told(after: LoadSample, status: str, words: str) -> None:
    check = other_work_check(load(0.0), after)
    assert (check.name, check.status, check.value, check.exit_code) == ("other programs", status, words, 0)
    assert ("--cpuset-cpus" in (check.remedy or "")) is (status == "warn")
