"""The labels source, url and vendor: from the matrix, from the command line, and what cannot be one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from images import __main__ as command
from images.build import bake, build
from images.ci import push
from images.errors import MatrixError, UsageError, VerificationError
from images.matrix import matrix
from images.matrix.publisher import Publisher, parse_address, parse_vendor

SOURCE = "https://git.example/team/appliance"
SOME = Publisher(source=SOURCE, vendor="A Team")


def test_what_is_not_known_is_no_label(job: build.Job) -> None:
    labels = build.moment_labels(job)
    assert not {f"org.opencontainers.image.{name}" for name in ("source", "url", "vendor")} & labels.keys()


def test_what_is_known_is_a_label_of_the_build_and_of_bake(job: build.Job) -> None:
    own = {"org.opencontainers.image.source": SOURCE, "org.opencontainers.image.vendor": "A Team"}
    assert own.items() <= build.moment_labels(replace(job, publisher=SOME)).items()
    target = json.loads(bake.bake_file([job.cell], SOME))["target"][job.cell.id]
    assert own.items() <= target["labels"].items()
    assert "org.opencontainers.image.url" not in target["labels"]


def test_a_flag_takes_the_place_of_the_matrix() -> None:
    given = {"source": None, "url": "https://a.example", "vendor": "B"}
    assert SOME.overridden(given) == Publisher(source=SOURCE, url="https://a.example", vendor="B")


def test_the_matrix_names_the_publisher(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    assert matrix.parse_matrix(matrix_data, lock_texts).publisher == Publisher()
    matrix_data["publisher"] = {"source": SOURCE, "vendor": "A Team"}
    assert matrix.parse_matrix(matrix_data, lock_texts).publisher == SOME
    matrix_data["publisher"] = {"source": "git.example"}
    with pytest.raises(MatrixError, match=r"publisher: no address for a label: git\.example"):
        matrix.parse_matrix(matrix_data, lock_texts)


@pytest.mark.parametrize("text", ["git.example", "ftp://a.example", "https://", 'https://a.example/"', "https://a b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address for a label"):
        parse_address(text)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="user or a password") as caught:
        parse_address("https://me:secret@git.example/team")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", 'A "Team"', "two\nlines", "$HOME", "back\\slash"])
def test_what_cannot_stand_in_a_label_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no name for the label vendor"):
        parse_vendor(text)


def test_verify_takes_them_with_reproduce_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", "--vendor", "A Team", "--dry-run"]) == 2
    assert "--vendor belongs to --reproduce" in capsys.readouterr().err


def test_a_wrong_address_on_the_command_line_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--source", "nowhere", "--dry-run"]) == 2
    assert "no address for a label: nowhere" in capsys.readouterr().err


def test_the_provenance_may_say_what_the_labels_say_and_no_other_address(job: build.Job) -> None:
    def said(value: str) -> list[dict[str, object]]:
        arguments = {"label:org.opencontainers.image.source": value}
        return [{"predicateType": f"{push.PROVENANCE}v0.2", "predicate": {"parameters": {"args": arguments}}}]

    push.refuse_leaks(job.cell, said(SOURCE), private=(), public=(SOURCE,))
    with pytest.raises(VerificationError, match="would publish an address"):
        push.refuse_leaks(job.cell, said(f"{SOURCE}/other"), private=(), public=(SOURCE,))


@pytest.mark.parametrize(
    ("publisher", "labels", "is_of"),
    [
        (Publisher(), {}, True),
        (Publisher(), {"org.opencontainers.image.vendor": "X", "other": "y"}, False),
        (Publisher(vendor="X"), {"org.opencontainers.image.vendor": "X"}, True),
        (Publisher(vendor="X"), {}, False),
        (Publisher(vendor="X"), {f"org.opencontainers.image.{name}": "X" for name in ("vendor", "url")}, False),
    ],
)
def test_an_image_of_another_publisher_is_another_image(
    publisher: Publisher, labels: dict[str, str], is_of: bool
) -> None:
    assert publisher.is_of(labels) is is_of
