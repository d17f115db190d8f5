"""The job list, and that the workflows which read it pass the linters that `make lint` runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml

from images import __main__ as command
from images.ci import ci, ci_steps
from images.errors import MatrixError
from images.matrix import drift, matrix, space
from images.matrix.matrix import Cell, Platform, Target
from images.pins import debian

PROGRAMS = Path(sys.executable).parent


def test_one_job_a_cell_with_a_build_for_each_platform(cell: Cell) -> None:
    both = replace(cell, platforms=("linux/amd64", "linux/arm64"), target=Target(name="x", cuda="13.0", sms=("90",)))
    assert json.loads(ci.jobs_file([both]))["cells"] == [
        {
            "cell": both.id,
            "free_disk": False,
            "timeout_minutes": ci.CUDA_TIMEOUT_MINUTES,
            "platforms": [
                {"platform": "linux/amd64", "arch": "amd64", "runner": "ubuntu-24.04"},
                {"platform": "linux/arm64", "arch": "arm64", "runner": "ubuntu-24.04-arm"},
            ],
        }
    ]


def test_a_cell_that_cannot_be_built_is_left_out_with_the_reason(cell: Cell) -> None:
    unresolved = replace(cell, base=replace(cell.base, digest=None, status="unresolved"))
    made = json.loads(ci.jobs_file([unresolved]))
    assert made["cells"] == []
    assert made["left_out"] == {cell.id: "no digest yet: debian:bookworm-slim"}


def test_a_platform_without_a_debian_lock_is_left_out_with_the_reason(cell: Cell) -> None:
    both = replace(cell, platforms=("linux/amd64", "linux/arm64"))
    arm = replace(cell, target=Target(name="y", cuda=None, sms=()), platforms=("linux/arm64",))
    made = json.loads(ci.jobs_file([both, arm], lambda _, platform: platform == "linux/amd64"))
    assert [(job["cell"], len(job["platforms"])) for job in made["cells"]] == [(both.id, 1)]
    assert set(made["left_out"]) == {f"{both.id} linux/arm64", f"{arm.id} linux/arm64"}
    assert "lock --debian" in made["left_out"][f"{arm.id} linux/arm64"]


def committed(project: Path) -> str:
    cells = matrix.load(project).cells
    return ci.jobs_file(cells, lambda cell, platform: (project / debian.path_for(cell.base, platform)).exists())


def test_every_platform_has_a_runner_and_an_output_of_the_workflow(project: Path) -> None:
    assert set(ci.RUNNERS) == set(get_args(Platform))
    workflow = yaml.safe_load((project / ".github/workflows/image.yml").read_text("utf-8"))
    assert set(workflow["jobs"]["build"]["outputs"]) == {name.partition("/")[2] for name in ci.RUNNERS}


def test_the_committed_list_is_what_the_matrix_gives(project: Path) -> None:
    assert (project / ci.JOBS_FILE).read_text("utf-8") == committed(project)


def test_a_changed_list_is_drift(project: Path, tmp_path: Path) -> None:
    text = committed(project)
    drift.write(tmp_path, {ci.JOBS_FILE: text.replace("ubuntu-24.04", "ubuntu-20.04")})
    (tmp_path / ".github/else").write_text("a neighbour is no stray")
    assert drift.drift(tmp_path, {ci.JOBS_FILE: text}) == [".github/images.json: differs from what the matrix renders"]


def test_actions_are_pinned_to_a_commit_and_say_where_it_is_from(project: Path) -> None:
    for path in (project / ".github/workflows").glob("*.yml"):
        text = path.read_text("utf-8")
        used = [line for line in text.splitlines() if "uses:" in line and "./" not in line]
        assert used or "uses: ./" in text
        assert all(re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d", line) for line in used)
        assert text.count("persist-credentials: false") == text.count("uses: actions/checkout@")


def test_what_is_published_is_of_the_lock_or_not_at_all(project: Path) -> None:
    text = (project / ".github/workflows/image.yml").read_text("utf-8")
    builds = [line for line in text.splitlines() if "-m images build " in line]
    assert len(builds) == 3
    assert all(" --locked " in line for line in builds)


def test_a_job_that_cannot_fit_is_not_scheduled_and_says_so(cell: Cell) -> None:
    """A runner that is cleared first is asked for where the disk of one as it comes is too small."""
    sized = [replace(cell, size_budget_mib=budget) for budget in (1000, 8000, 12000)]
    needed = [space.total_mib(each) for each in sized]
    assert needed[0] < ci.RUNNER_MIB < needed[1] < ci.RUNNER_MIB + ci.FREED_MIB < needed[2]
    assert [ci.job(each)["free_disk"] for each in sized[:2]] == [False, True]
    made = json.loads(ci.jobs_file([sized[2]]))
    assert made["cells"] == []
    assert [each["cell"] for each in made["large"]] == [cell.id]
    assert made["left_out"][cell.id].startswith(f"needs {needed[2]} MiB, a runner has {ci.RUNNER_MIB} and ")
    assert "LARGE_RUNNER" in made["left_out"][cell.id]


def test_images_are_tagged_by_cell_day_and_version_and_signed_without_a_key(project: Path) -> None:
    text = (project / ".github/workflows/image.yml").read_text("utf-8")
    merge = yaml.safe_load(text)["jobs"]["merge"]
    assert merge["permissions"] == {"packages": "write", "id-token": "write", "attestations": "write"}
    script = next(step["run"] for step in merge["steps"] if step.get("id") == "merge")
    for tag in ("${REGISTRY}:${CELL}", "${REGISTRY}:${CELL}-$(date --utc +%Y%m%d)", "${GITHUB_REF_NAME#v}-${CELL}"):
        assert tag in script
    signed = next(step["with"] for step in merge["steps"] if "attest" in step.get("uses", ""))
    assert signed["subject-digest"] == "${{ steps.merge.outputs.digest }}"
    assert signed["push-to-registry"] is True
    caches = re.findall(r"ref=(\S+?)[,\"]", text)
    names = {f"${{{name}}}-cache:${{CELL}}-${{ARCH}}" for name in ("PUBLISHED", "REGISTRY")}
    assert set(caches) == names  # no tag beside the images'


def test_images_are_built_again_every_week_and_actions_are_kept_up(project: Path) -> None:
    workflow = yaml.safe_load((project / ".github/workflows/images.yml").read_text("utf-8"))
    assert workflow[True]["schedule"] == [{"cron": "17 4 * * 2"}]  # the day after `lock`
    called = yaml.safe_load((project / ".github/workflows/image.yml").read_text("utf-8"))[True]["workflow_call"]
    assert set(workflow["jobs"]["image"]["with"]) == set(called["inputs"])
    (update,) = yaml.safe_load((project / ".github/dependabot.yml").read_text("utf-8"))["updates"]
    assert (update["package-ecosystem"], update["schedule"]) == ("github-actions", {"interval": "weekly"})


@pytest.mark.parametrize(
    ("job", "verbs"),
    [
        ("propose", ["list", "lock", "lock", "lock", "render"]),
        ("wheels", ["lock", "lock", "render"]),
        ("engine", ["pin", "render", "build", "verify", "render", "build", "fetch"]),
    ],
)
def test_a_refreshed_lock_is_proposed_by_commands_that_exist(project: Path, job: str, verbs: list[str]) -> None:
    """The workflow also asks for the permissions that it needs to write."""
    workflow = yaml.safe_load((project / ".github/workflows/lock.yml").read_text("utf-8"))
    script = "\n".join(step.get("run", "") for step in workflow["jobs"][job]["steps"])
    commands = re.findall(r"-m images ((?:[\w/-]+ ?)+)", script)
    assert [words.split()[0] for words in commands] == verbs
    for words in commands:  # an unknown one ends here, with argparse's own words
        assert command.parser().parse_args(words.split()).run
    assert workflow["jobs"][job]["permissions"] == {"contents": "write", "pull-requests": "write"}
    assert workflow[True] == {
        "schedule": [{"cron": "17 4 * * 1"}],
        "workflow_dispatch": None,
    }  # `on`, as YAML 1.1 has it


@pytest.mark.thorough
def test_what_a_proposal_adds_is_what_its_commands_write(project: Path) -> None:
    """A generated file that no proposal takes along fails `render --check` in the pull request."""
    (line,) = re.findall(r"^git add (.+)$", (project / ".github/propose").read_text("utf-8"), re.MULTILINE)
    added = [Path(word) for word in line.split()]
    assert all((project / path).exists() for path in added)
    done = subprocess.run(
        [sys.executable, "-m", "images", "render", "--dry-run", "--json"], cwd=project, capture_output=True, check=True
    )
    written = [Path(name) for name in json.loads(done.stdout)]
    assert written
    assert [path for path in written if not any(path.is_relative_to(each) for each in added)] == []


def test_workflows_commit_by_one_script(project: Path, tmp_path: Path) -> None:
    files = [path for path in (project / ".github").rglob("*") if path.is_file()]
    assert [path.name for path in files if "user.name" in path.read_text("utf-8")] == ["commit"]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run([project / ".github/commit", "Engine", "--allow-empty"], cwd=tmp_path, check=True)
    done = subprocess.run(["git", "log", "--format=%an: %s"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"github-actions\[bot\]: Engine as of \d{4}-\d\d-\d\d\n", done.stdout)


def test_workflows_name_no_address(project: Path) -> None:
    for path in [*(project / ".github").rglob("*.yml"), project / ci.JOBS_FILE, project / ".github/containerd-store"]:
        assert "://" not in path.read_text("utf-8")


@pytest.mark.parametrize("argv", [("zizmor", "--offline", "--quiet")])
def test_workflows_pass_their_linters(project: Path, argv: tuple[str, ...]) -> None:
    done = _lint(argv, sorted((project / ".github/workflows").glob("*.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("argv", "sound", "planted", "said"),
    [
        (("zizmor", "--offline", "--quiet"), "@de0fac2e4500dabe0009e67214ff5f5447ce83dd", "@v6", "unpinned-uses"),
        (("zizmor", "--offline", "--quiet"), '"$CELL"', '"${{ inputs.cell }}"', "template-injection"),
        (("zizmor", "--offline", "--quiet"), "on:\n", "on:\n  pull_request_target:\n", "dangerous-triggers"),
    ],
)
@pytest.mark.thorough
def test_a_planted_fault_of_a_workflow_is_caught(
    project: Path, tmp_path: Path, argv: tuple[str, ...], sound: str, planted: str, said: str
) -> None:
    folder = tmp_path / ".github/workflows"
    shutil.copytree(project / ".github/workflows", folder)
    path = folder / "image.yml"
    text = path.read_text("utf-8")
    assert sound in text
    path.write_text(text.replace(sound, planted), "utf-8")
    done = _lint(argv, [path])
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("planted", "said"), [("RUN sudo ls\n", "DL3004"), ("ADD x /x\n", "DL3020"), ("RUN apt-get install x\n", "DL3014")]
)
@pytest.mark.thorough
def test_a_planted_fault_of_a_dockerfile_is_caught(project: Path, planted: str, said: str) -> None:
    dockerfile = (project / "images/rendered/llama-cpu/Dockerfile").read_text("utf-8")
    assert _hadolint(project, dockerfile).returncode == 0
    done = _hadolint(project, dockerfile + planted)
    assert done.returncode == 1
    assert said in done.stdout


def test_each_rule_that_is_left_out_has_its_reason(project: Path) -> None:
    lines = (project / ".hadolint.yaml").read_text("utf-8").splitlines()
    rules = [number for number, line in enumerate(lines) if re.match(r"  - [A-Z]", line)]
    assert len(rules) == len(yaml.safe_load("\n".join(lines))["ignored"])
    assert all(lines[number - 1].startswith("  # ") for number in rules)


def _lint(argv: tuple[str, ...], files: list[Path]) -> subprocess.CompletedProcess[str]:
    program, *flags = argv
    words = [str(PROGRAMS / program), *flags, *map(str, files)]
    return subprocess.run(words, cwd=files[0].parents[2], capture_output=True, text=True, check=False)


def _hadolint(project: Path, dockerfile: str) -> subprocess.CompletedProcess[str]:
    words = [str(PROGRAMS / "hadolint"), "--config", str(project / ".hadolint.yaml"), "-"]
    return subprocess.run(words, input=dockerfile, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("text", "said"), [("[" * 3000, "nested too deeply"), ("a: 1", "it names no jobs")])
def test_a_workflow_that_cannot_be_read_is_refused_in_words(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / ci_steps.WORKFLOWS).mkdir(parents=True)
    (tmp_path / ci_steps.WORKFLOWS / "x.yml").write_text(text)
    with pytest.raises(MatrixError, match=said):
        ci_steps.load(tmp_path)
