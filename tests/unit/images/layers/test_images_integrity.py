"""What was changed after the build, found by the manifest that the build wrote; and what bends how programs run."""

from __future__ import annotations

from typing import Any

import pytest

from images.layers import integrity
from images.layers.tree import Entry, Tree

ONE, OTHER = "1" * 64, "2" * 64
FACTS, IDENTITY = "opt/appliance/engine_facts.json", "opt/appliance/image_facts.json"
PASSWD = b"root:x:0:0:root:/root:/bin/bash\nappliance:x:1000:0::/data:/usr/sbin/nologin\n"


@pytest.fixture
def tree() -> Tree:
    """Return the tree that a build leaves: the manifest is in layer 2, the image's identity in layer 3."""
    base = [_entry("etc/hosts", layer=0), _entry("etc/ld.so.conf", layer=0), _entry("tmp", kind="folder", mode=0o1777)]
    engine = [_entry("opt/llama/llama-server"), _entry(integrity.ACCOUNTS, content=PASSWD), _entry(FACTS, layer=2)]
    text = "".join(f"{ONE}  /{each.path}\n" for each in engine)
    text += f"{ONE}  /etc/ld.so.conf\n"
    ours = [*engine, _entry(integrity.MANIFEST, layer=2, content=text.encode()), _entry(IDENTITY, layer=3)]
    return Tree(
        files={each.path: each for each in (*base, *ours)}, base={each.path: each for each in base if each.layer == 0}
    )


def test_an_image_as_it_was_built_has_no_fault(tree: Tree) -> None:
    assert integrity.changed(tree, ONE) == []
    assert integrity.preloaded(tree, ["PATH=/usr/bin", "OLD_LD_PRELOAD=1"]) == []
    assert (integrity.roots(tree), integrity.writable(tree)) == ([], [])


def test_a_model_image_may_add_its_recipe_and_weights(tree: Tree) -> None:
    _put(tree, "opt/models/models--a--b/blobs/1", layer=4)
    _put(tree, "opt/models/models--a--b/snapshots/m/x.gguf", kind="link", layer=4)
    _put(tree, "opt/appliance/recipe.json", layer=5)
    _put(tree, IDENTITY, layer=5, sha256=OTHER)
    assert integrity.changed(tree, ONE) == []


def test_one_byte_appended_names_its_file(tree: Tree) -> None:
    _put(tree, "opt/llama/llama-server", layer=4, sha256=OTHER)
    assert integrity.changed(tree, ONE) == ["changed: opt/llama/llama-server"]


def test_a_change_inside_a_layer_is_found_as_well(tree: Tree) -> None:
    _put(tree, "opt/llama/llama-server", layer=1, sha256=OTHER)
    assert integrity.changed(tree, ONE) == ["changed: opt/llama/llama-server"]


def test_what_is_gone_or_new_or_a_link_instead_is_named(tree: Tree) -> None:
    del tree.files["opt/llama/llama-server"]
    _put(tree, "usr/bin/curl", layer=1)
    _put(tree, "usr/bin/python3", kind="link", layer=4)
    _put(tree, "etc/ld.so.conf", kind="link", layer=4)
    assert integrity.changed(tree, ONE) == [
        "added: etc/ld.so.conf",
        "added: usr/bin/curl",
        "added: usr/bin/python3",
        "gone: etc/ld.so.conf",
        "gone: opt/llama/llama-server",
    ]


def test_a_manifest_that_came_later_is_none(tree: Tree) -> None:
    _put(tree, integrity.MANIFEST, layer=4, content=b"")
    assert integrity.changed(tree, ONE) == [
        "the manifest is of another layer than the facts that the build wrote with it: opt/appliance/files.sha256"
    ]
    del tree.files[integrity.MANIFEST]
    assert integrity.changed(tree, ONE) == ["no manifest: opt/appliance/files.sha256"]


@pytest.mark.parametrize("label", [OTHER, None])
def test_a_manifest_that_was_written_anew_is_not_the_labels(tree: Tree, label: str | None) -> None:
    """Whoever changed a file and its line: the label is in the image's configuration, and so in its digest."""
    assert integrity.changed(tree, label) == [
        f"the manifest is not the one of the image's label: {ONE}, {label or 'no label'}"
    ]


def test_names_that_sha256sum_escapes_are_read() -> None:
    text = f"{ONE}  /a b\n\\{OTHER}  /c\\\\d\\ne\n"
    assert integrity.parse_manifest(text) == {"a b": ONE, "c\\d\ne": OTHER}


@pytest.mark.parametrize("line", ["LD_PRELOAD=/x.so", "LD_AUDIT=/x.so", "LD_LIBRARY_PATH=/x", "GLIBC_TUNABLES=x=y"])
def test_what_bends_the_linker_is_named(tree: Tree, line: str) -> None:
    assert integrity.preloaded(tree, [line]) == [f"{line.partition('=')[0]} in the environment"]


@pytest.mark.parametrize("path", ["etc/ld.so.preload", "etc/ld.so.conf", "etc/ld.so.conf.d/x.conf"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_of_the_linker_is_named(tree: Tree, path: str, kind: str) -> None:
    _put(tree, path, kind=kind, layer=4)
    assert integrity.preloaded(tree, []) == [path]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PASSWD + b"toor:x:0:0::/:/bin/sh\n", ["toor"]),
        (PASSWD + b"toor:x:00:0::/:/bin/sh\n", ["toor"]),
        (PASSWD + b"+::::::\n", ["not a line of it: +::::::"]),
    ],
)
def test_a_second_root_is_named(tree: Tree, text: bytes, said: list[str]) -> None:
    _put(tree, integrity.ACCOUNTS, content=text)
    assert integrity.roots(tree) == said


def test_an_image_without_accounts_says_so() -> None:
    assert integrity.roots(Tree()) == ["missing: etc/passwd"]


@pytest.mark.parametrize(
    ("path", "values", "said"),
    [
        ("opt/llama", {"kind": "folder", "mode": 0o777}, "opt/llama (777, UID 0)"),
        ("opt", {"kind": "folder", "mode": 0o775}, "opt (775, UID 0)"),
        (FACTS, {"mode": 0o664}, f"{FACTS} (664, UID 0)"),
        ("usr/bin/x", {"mode": 0o755, "uid": 1000}, "usr/bin/x (755, UID 1000)"),
    ],
)
def test_code_that_the_user_may_replace_is_named(tree: Tree, path: str, values: dict[str, Any], said: str) -> None:
    _put(tree, path, **values)
    assert integrity.writable(tree) == [said]


def test_folders_without_code_may_be_written_to(tree: Tree) -> None:
    _put(tree, "data", kind="folder", mode=0o775)
    _put(tree, "usr/bin/link", kind="link", mode=0o777)
    assert integrity.writable(tree) == []


def _put(tree: Tree, path: str, **values: Any) -> None:
    tree.files[path] = _entry(path, **values)


def _entry(path: str, **values: Any) -> Entry:
    plain = {"kind": "file", "mode": 0o644, "uid": 0, "gid": 0, "size_bytes": 1, "layer": 1, "sha256": ONE}
    return Entry(path=path, **{**plain, **values})
