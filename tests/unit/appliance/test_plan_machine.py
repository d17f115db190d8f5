"""`appliance plan --machine`: another machine's plan, and what `--json` prints, which is as its schema says."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.__main__ import main
from appliance.engines.llama.planning.space import Space
from appliance.image_facts import dump_facts
from appliance.plan.head import ContextPrice, LargerContext
from appliance.plan.parts.speeds import duration, rate
from appliance.probe import as_document
from appliance.settings import PREFIX, resolve_settings
from tests.builders import facts, facts_for, model
from tests.golden import plan_schema
from tests.golden.machines import MACHINES
from tests.golden.printed import HERE
from tests.json_schema import problems
from tests.shapes import SMALL, write_gguf
from tests.shapes.beside import write_adapter, write_projector

SCHEMA = json.loads(plan_schema.PATH.read_text())
BY_HAND = """
cpu: {logical: 16, physical: 8}
memory: {total_mib: 64000}
gpus:
  driver: 580.95.05
  gpus:
    - {name: NVIDIA GeForce RTX 4090, sm: "89", vram_total_mib: 24564, bandwidth_gb_s: 1008}
"""


@dataclass(kw_only=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Image:
    """An image of llama.cpp with code for these chips, or for the CPU alone, on an empty volume."""

    def __init__(self, root: Path, capture: pytest.CaptureFixture[str], *sms: str) -> None:
        self.root = root
        self._capture = capture
        image, engine = facts(has_cuda=bool(sms), variants=("x64", "haswell", "alderlake", "skylakex"))
        if sms:
            image = replace(image, cuda="13.0", sm=sms, cell=f"llama-cu130-sm{sms[0]}", driver_floor_sass="580.65.06")
        (root / "facts").mkdir()
        (root / "facts/image_facts.json").write_text(dump_facts(image))
        (root / "facts/engine_facts.json").write_text(dump_facts(engine))

    def plan(self, *words: str) -> Said:
        code = main(["plan", "--data-dir", str(self.root / "data"), "--facts-dir", str(self.root / "facts"), *words])
        out, err = self._capture.readouterr()
        return Said(code=code, out=out, err=err)

    def machine(self, name: str) -> str:
        path = self.root / f"{name}.json"
        path.write_text(json.dumps(as_document(MACHINES[name])))
        return str(path)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Image:
    return Image(tmp_path, capsys, "89", "120", "75", "86")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["2x4090", "laptop-5060", "4x2080ti-22g", "24+8"])
def test_it_is_the_plan_that_the_machine_itself_would_have(image: Image, name: str) -> None:
    said = image.plan("--machine", image.machine(name), "--model", "qwen3-30b-a3b@Q4_K_M", "--json")
    assert said.code == 0, said.err
    hardware = MACHINES[name]
    settings = resolve_settings({}, {})
    there = Space(settings, *facts_for(hardware), hardware, model("qwen3-30b-a3b", "Q4_K_M")).best
    assert said.document["plan"]["key"] == there.key
    assert said.document["plan"]["placement"]["shares"][0]["gpu"]["name"] == hardware.gpus.gpus[0].name
    assert said.document["machine"] == {"source": image.machine(name), "assumed": []}
    assert said.document["shape"]["name"] == "qwen3-30b-a3b@Q4_K_M"
    assert problems(said.document, SCHEMA) == []


def test_a_buyer_writes_it_by_hand(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(BY_HAND.encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    said = image.plan("--machine", "-", "--model", "qwen3-32b")
    assert said.code == 0, said.err
    assert "\nfor the machine of stdin, not for this one\nno file: the shape of qwen3-32b@Q4_K_M" in said.out
    assert "CUDA0 (NVIDIA GeForce RTX 4090" in said.out
    assert "\na prediction; measuring decides between it and others that fit\n" in said.out
    assert "stdin does not say memory.available_mib: taken as 61,952, all but 2,048" in said.err


def test_the_command_line_names_where_the_file_would_be(image: Image) -> None:
    said = image.plan("--machine", image.machine("2x4090"), "--model", "phi-4@q8_0", "--dry-run")
    argv = shlex.split(said.out)
    assert argv[argv.index("--model") + 1] == str(image.root / "data/models/phi-4-Q8_0.gguf")


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        (
            ("--model", "qwen3-30b-a3c@Q4_K_M"),
            10,
            "no published model's shape has this name",
            "perhaps you meant qwen3-30b-a3b",
        ),
        (
            ("--model", "QWEN3-30B-A3C@Q4_K_M"),
            10,
            "no published model's shape has this name",
            "perhaps you meant qwen3-30b-a3b",
        ),
        (("--model", "x@Q4_K_M"), 10, "no published model's shape has this name: x@Q4_K_M", "known: llama-3.1"),
        (("--model", "phi-4@Q9_Z"), 10, "model phi-4@Q9_Z: quantization is unknown: Q9_Z", "such as phi-4@Q4_K_M"),
        (("--model", "phi-4", "--files"), 10, "--files compares files", "leave out --files"),
        (("--model", "phi-4@"), 10, "model phi-4@: quantization is unknown", "such as phi-4@Q4_K_M"),
        (("--model", "nobody"), 10, "no model of that name is on the volume: nobody", ""),
        (("--model", "deepseek-v3@Q4_K_M"), 31, "model does not fit", "use a smaller model or quantization"),
        (("--model", "phi-4", "--ctx-size", "10000000"), 10, "native 16,384: 10,000,000", "use --ctx"),
    ],
)
def test_what_cannot_be_planned_is_said(
    image: Image, words: tuple[str, ...], code: int, message: str, hint: str
) -> None:
    said = image.plan("--machine", image.machine("2x4090"), *words)
    assert said.code == code, said.err
    assert message in said.err
    assert f"hint: {hint}" in said.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--mmproj", "/nope.gguf"), 10, "setting mmproj names no file: '/nope.gguf' (flag --mmproj)"),
        (("--mmproj", "text.gguf"), 30, "text.gguf"),
        (("--mmproj", "other.gguf"), 30, "gives vectors of 64 values, but qwen2.5-vl-7b"),
        (("--pooling", "rank"), 10, "model has no head that scores"),
        (("--lora", "nope.gguf"), 10, "setting lora names no file: 'nope.gguf'"),
        (("--lora", "adapter.gguf"), 10, "setting lora cannot be planned: adapter.gguf (flag --lora): no file of"),
        (("--chat-template-file", "/nope"), 10, "setting chat_template_file cannot be read: '/nope'"),
        (("--draft-model", "nope.gguf"), 10, "no model of that name is on the volume: nope.gguf"),
    ],
)
def test_what_is_named_beside_a_shape_is_looked_at_as_beside_a_file(
    image: Image, words: tuple[str, ...], code: int, message: str
) -> None:
    models = image.root / "data/models"
    models.mkdir(parents=True)
    write_projector(models / "other.gguf", 64)
    write_gguf(models / "text.gguf", SMALL["gqa"])
    write_adapter(models / "adapter.gguf", {"blk.0.attn_q.weight": (64, 64)})
    said = image.plan("--machine", image.machine("2x4090"), "--model", "qwen2.5-vl-7b", *words)
    assert said.code == code, said.err
    assert message in said.err


def test_a_projector_beside_a_shape_is_counted(image: Image, tmp_path: Path) -> None:
    path = write_projector(tmp_path / "mmproj.gguf", 3584)
    request = ("--machine", image.machine("2x4090"), "--model", "qwen2.5-vl-7b", "--json")
    without = image.plan(*request).document["plan"]
    said = image.plan(*request, "--mmproj", str(path))
    assert said.code == 0, said.err
    (share,), (before,) = said.document["plan"]["placement"]["shares"], without["placement"]["shares"]
    assert share["memory"]["overhead"] >= 512 > before["memory"]["overhead"]


def test_an_image_that_could_not_start_there_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "h").mkdir()
    on_cpu, hopper = Image(tmp_path / "cpu", capsys), Image(tmp_path / "h", capsys, "90")
    there = on_cpu.machine("2x4090")
    said = on_cpu.plan("--machine", there, "--model", "phi-4")
    assert (said.code, "this image has no GPU kernels" in said.err) == (23, True)
    said = hopper.plan("--machine", there, "--model", "phi-4")
    assert (said.code, "no kernels for NVIDIA GeForce RTX 4090" in said.err) == (20, True)
    said = Image(tmp_path, capsys, "75").plan("--machine", on_cpu.machine("t4"), "--model", "phi-4")
    assert (said.code, "driver is too old" in said.err) == (21, True)


def test_contradictions_are_10_with_file_and_key(image: Image) -> None:
    path = Path(image.machine("2x4090"))
    path.write_text(path.read_text().replace('"vram_free_mib": 24564', '"vram_free_mib": 40960', 1))
    said = image.plan("--machine", str(path), "--model", "phi-4")
    assert said.code == 10
    assert f"error: machine file {path}: gpus.gpus[0].vram_free_mib: 40,960 is more than" in said.err


def test_names_with_control_sequences_are_shown_as_words(image: Image) -> None:
    path, models = Path(image.machine("2x4090")), image.root / "data/models"
    path.write_text(path.read_text().replace('"NVIDIA GeForce RTX 4090"', r'"\u001b[31mX\nY"'))
    models.mkdir(parents=True)
    write_gguf(models / "a\x1b[31mb.gguf", SMALL["gqa"])
    said = [image.plan("--machine", str(path), *words) for words in ((), ("--verbose",), ("--dry-run",), ("--json",))]
    assert [(each.code, "\x1b" in each.out + each.err) for each in said] == [(0, False)] * 4
    plain, _, command, document = said
    assert r"\x1b[31mX\nY" in plain.out
    assert r"a\x1b[31mb.gguf" in command.out
    assert document.document["plan"]["placement"]["shares"][0]["gpu"]["name"] == "\x1b[31mX\nY"


def test_nine_gpus_of_three_kinds_are_planned(image: Image) -> None:
    """An unusual machine is planned, not refused."""
    found = MACHINES["3090+4090+5060"]
    gpus = tuple(replace(gpu, index=at, uuid=f"GPU-{at}") for at, gpu in enumerate(3 * found.gpus.gpus))
    path = image.root / "nine.json"
    path.write_text(json.dumps(as_document(replace(found, gpus=replace(found.gpus, gpus=gpus)))))
    said = image.plan("--machine", str(path), "--model", "gpt-oss-120b", "--json")
    assert said.code == 0, said.err
    assert 2 <= len(said.document["plan"]["placement"]["shares"]) <= 9


def test_outside_of_an_image_it_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["plan", "--facts-dir", str(tmp_path / "none"), "--data-dir", str(tmp_path), "--model", "phi-4"])
    said = capsys.readouterr().err
    assert code == 10
    assert "facts of this image cannot be read" in said
    assert "outside of an image there are none: `docker run --rm -i IMAGE` has this verb" in said


def test_machines_are_compared_side_by_side(image: Image) -> None:
    files = [image.machine(name) for name in ("2x4090", "24+8", "laptop-5060")]
    said = image.plan("--compare", *files, "--model", "llama-3.3-70b")
    assert said.code == 0, said.err
    rows = {line.split()[0]: line for line in said.out.splitlines() if line[:1].strip()}
    assert list(rows) == ["machine", "image", "model", "context", "placement", "speed", "memory"]
    assert rows["model"].split()[1:] == ["llama-3.3-70b@Q4_K_M"] * 2
    assert "error 31: model does not fit:" in rows["context"]
    found = image.plan("--compare", *files, "--model", "llama-3.3-70b", "--json").document
    assert [row["machine"]["source"] for row in found] == files
    assert found[2]["error"]["exit_code"] == 31
    assert [problems(row, SCHEMA) for row in found[:2]] == [[], []]
    alone = image.plan("--machine", files[0], "--model", "llama-3.3-70b", "--json").document
    assert found[0] == alone


def test_no_machine_of_those_compared_can_serve_it(image: Image) -> None:
    file = image.machine("cpu-limit-8g")
    assert image.plan("--compare", file, file, "--model", "llama-3.3-70b").code == 31


@pytest.mark.parametrize("words", [("--machine", "m.yaml"), ("--files",), ("--dry-run",)])
def test_comparing_goes_alone(image: Image, words: tuple[str, ...]) -> None:
    said = image.plan("--compare", image.machine("t4"), *words, "--model", "phi-4")
    assert said.code == 2
    assert f"--compare and {words[0]} do not go together" in said.err


def test_five_lines_come_first(image: Image) -> None:
    said = image.plan("--machine", image.machine("24+8"), "--model", "qwen3-32b@Q8_0", "--json")
    text = image.plan("--machine", image.machine("24+8"), "--model", "qwen3-32b@Q8_0").out.splitlines()
    head = said.document["head"]
    assert text[:6] == [*(f"{name:<9}  {words}" for name, words in head.items()), ""]
    assert head["command"] == shlex.join(said.document["argv"])
    assert said.document["plan"]["context"] < 40_960
    larger = said.document["larger_contexts"][0]
    assert larger["setting"] == f"--ctx-size {larger['context']}"
    flags = larger["setting"].split()
    with_it = image.plan("--machine", image.machine("24+8"), "--model", "qwen3-32b@Q8_0", "--json", *flags)
    assert with_it.document["plan"]["context"] == larger["context"]
    assert with_it.document["plan"]["speed"]["decode_tokens_per_s"] == pytest.approx(larger["decode_tokens_per_s"])
    now, price = larger["now"], larger["price"]
    assert price["decode_tokens_per_s"] == larger["decode_tokens_per_s"]
    assert now["prefill_tokens_per_s"] == said.document["plan"]["speed"]["prefill_tokens_per_s"]
    assert price["fill_s"] > now["fill_s"] > 0
    assert f"(decode {rate(now['decode_tokens_per_s'])} -> {rate(price['decode_tokens_per_s'])} tok/s" in text[0]
    assert f"read in full in {duration(now['fill_s'])} -> {duration(price['fill_s'])}" in text[0]
    assert "placement" in said.document["to_measure"]
    still = image.plan("--machine", image.machine("24+8"), "--model", "qwen3-32b@Q8_0", "--json", "--tune", "off")
    assert still.document["to_measure"] == []


def test_a_longer_context_tells_the_speeds_that_change() -> None:
    now = ContextPrice(decode_tokens_per_s=33.0, prefill_tokens_per_s=2000.0, fill_s=4.0)
    dear = ContextPrice(decode_tokens_per_s=14.0, prefill_tokens_per_s=900.0, fill_s=7200.0)
    free = ContextPrice(decode_tokens_per_s=33.2, prefill_tokens_per_s=1999.0, fill_s=4.01)
    told = [
        LargerContext(context=65536, setting="--flag 1", decode_tokens_per_s=None, price=price, now=now).describe()
        for price in (dear, free, None)
    ]
    assert told == [
        "65,536 with --flag 1 (decode 33 -> 14 tok/s, prefill 2000 -> 900, read in full in 4.0 s -> 2.0 hours)",
        "65,536 with --flag 1 (decode 33 tok/s)",
        "65,536 with --flag 1",
    ]


def test_memory_that_keeps_a_larger_ubatch_away_is_said(image: Image) -> None:
    """The plan names the missing memory. With that memory the larger ubatch is taken."""
    path = image.root / "m.yaml"
    server = (HERE / "two-sockets.yaml").read_text()
    path.write_text(server)
    said = image.plan("--machine", str(path), "--model", "deepseek-v3", "--json").document["plan"]
    words = {choice["name"]: choice["reason"] for choice in said["choices"]}["ubatch"]
    missing = re.search(r"4096 would read .* needs at least ([\d,]+) MiB more of host memory", words)
    assert missing, words
    enough = 382 * 1024  # MiB of 382 GiB
    assert enough > 382_000 + int(missing[1].replace(",", ""))
    path.write_text(server.replace("382000", str(enough)))
    more = image.plan("--machine", str(path), "--model", "deepseek-v3", "--json").document["plan"]
    assert more["launch"]["ubatch"] == 4096
    assert more["speed"]["prefill_tokens_per_s"] > 4 * said["speed"]["prefill_tokens_per_s"]


def test_a_shape_of_the_cpu_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = Image(tmp_path, capsys)
    said = image.plan("--machine", image.machine("cpu-16g"), "--model", "llama-3.1-8b@Q4_K_M", "--json")
    assert said.document["plan"]["placement"]["shares"] == []
    assert problems(said.document, SCHEMA) == []


def test_the_schema_is_made_from_what_is_printed() -> None:
    """`python -m tests.golden.plan_schema` writes it anew: what is taken away or renamed breaks scripts."""
    assert plan_schema.text() == plan_schema.PATH.read_text()


def test_the_schema_refuses_what_is_not_so(image: Image) -> None:
    document = image.plan("--machine", image.machine("24+8"), "--model", "phi-4", "--json").document
    assert problems(document, SCHEMA) == []
    for change, words in (
        ({"schema": 2}, "$.schema: 2 is not 1"),
        ({"argv": [1]}, "$.argv[0]: 1 is no string"),
        ({"profile": 7}, "$.profile: none of 2 fits 7"),
        ({"plan": {**document["plan"], "context": "many"}}, "$.plan.context: 'many' is no integer"),
    ):
        assert words in problems({**document, **change}, SCHEMA)
    del document["plan"]["memory"]["kv"], document["plan"]["placement"]["shares"][0]["gpu"]
    assert problems(document, SCHEMA) == ["$.plan.memory: lacks kv", "$.plan.placement.shares[0]: lacks gpu"]


def test_every_field_of_the_documents_that_are_printed_is_in_the_schema(image: Image) -> None:
    document = image.plan("--machine", image.machine("2x4090"), "--model", "qwen3.6-27b", "--json").document
    defs = SCHEMA["$defs"]
    assert document["plan"].keys() == defs["Plan"]["properties"].keys()
    assert document["plan"]["memory"].keys() == defs["Memory"]["properties"].keys()
    assert document["plan"]["launch"].keys() == defs["LlamaLaunch"]["properties"].keys()
    assert document.keys() <= SCHEMA["properties"].keys()
    assert not re.search(r"\b(NaN|Infinity)\b", json.dumps(document))
