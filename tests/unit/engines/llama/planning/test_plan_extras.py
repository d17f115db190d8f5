"""What users of llama-server ask for beside what is planned: own arguments, template, thoughts, memory left alone."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.engine_args import OWNED, UNOFFERED, owner_of
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.arguments.loader_check import Projection, refine
from appliance.engines.llama.planning.memory.memory import MIB
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process import server
from appliance.engines.llama.process.server import arguments
from appliance.errors import ConfigError, ModelDoesNotFitError
from appliance.model import Adapter, Model, Projector, read_model
from appliance.plan import Plan
from appliance.profile import Key, make_key
from appliance.profile.record import parse_plan
from appliance.settings import SETTINGS, is_flag, resolve_settings
from tests.builders import DIGEST, ENGINE, IMAGE, SMALL, USAGE, facts, machine, model
from tests.golden.machines import MACHINES
from tests.shapes.beside import MEAN, write_bert

SOCKET = Path("/tmp/e.sock")
CARD = "t4"


def space(**flags: str | list[str]) -> Space:
    return Space(resolve_settings(flags, {}), IMAGE, ENGINE, machine(), SMALL)


def on_card(**flags: str) -> Plan:
    image, engine = facts(has_cuda=True)
    return Space(resolve_settings(flags, {}), image, engine, MACHINES[CARD], model("llama-3.1-8b", "Q4_K_M")).best


def refusal(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        space(engine_arg=list(words))
    assert caught.value.exit_code == 10
    return caught.value


def argv(plan: Plan) -> tuple[str, ...]:
    return arguments(plan, ENGINE, SOCKET)


def choice(plan: Plan, name: str) -> tuple[str, str, str]:
    (found,) = [each for each in plan.choices if each.name == name]
    return found.value, found.reason, found.source


def test_arguments_reach_the_engine_as_they_are() -> None:
    plan = space(engine_arg=["--top-k 20 --temp -0.5", "--chat-template-kwargs '{\"a\": 1}'", "--no-warmup"]).best
    words = ("--top-k", "20", "--temp", "-0.5", "--chat-template-kwargs", '{"a": 1}', "--no-warmup")
    assert launch_of(plan).extras.engine_args == words
    at = argv(plan).index("--top-k")
    assert argv(plan)[at : at + len(words)] == words
    value, reason, source = choice(plan, "engine_arg")
    assert value == "--top-k 20 --temp -0.5 --chat-template-kwargs '{\"a\": 1}' --no-warmup"
    assert (reason, source) == ("passed to the engine as it is", "flag --engine-arg")


def test_every_plan_of_the_space_and_of_an_earlier_start_has_them() -> None:
    asked = space(engine_arg="--top-k 20")
    assert all("--top-k" in argv(plan) for plan in asked.all())
    now = asked.now(space(engine_arg="--top-k 40", reasoning_format="none").best)
    assert isinstance(now, Plan)
    assert launch_of(now).extras == launch_of(asked.best).extras  # of today, whatever was asked for then


def test_what_the_figures_know_nothing_of_is_said() -> None:
    plan = space(engine_arg="-ot 'ffn_.*=CPU' --no-kv-offload --top-k 1").best
    assert choice(plan, "engine_arg")[1].endswith("; the figures here are without -ot and --no-kv-offload")


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("--topk 20", "a flag that this engine has not: --topk", "perhaps you meant --top-k"),
        ("--ctx_size 1", "a flag that this engine has not: --ctx_size", "perhaps you meant --ctx-size"),
        ("--frobnicate", "a flag that this engine has not: --frobnicate", "build 11312"),
        ("-c 4096", "the setting ctx_size stands for: -c", "use --ctx-size N"),
        ("--top-k 2 --n-gpu-layers=99", "the setting gpu_layers stands for: --n-gpu-layers", "use --gpu-layers N"),
        ("--fit-target 2048", "the setting reserve_mib stands for: --fit-target", "use --reserve-mib MIB"),
        ("--flash-attn off", "cannot be given: --flash-attn", "take it out"),
        ("--api-key x", "the setting auth stands for: --api-key", "use --auth on|off"),
        ("--prio 3", "cannot be given: --prio", "take it out"),
        ("--cpu-mask ff", "the setting threads stands for: --cpu-mask", "use --threads N"),
        ("-Cr 0-3", "the setting threads stands for: -Cr", "use --threads N"),
        ("--cpu-strict 1", "the setting threads stands for: --cpu-strict", "use --threads N"),
        ("--log-verbosity 0", "the appliance reads the engine's log", "take it out"),
        ("--override-kv llama.context_length=int:9", "the setting ctx_size stands for", "--rope-scaling yarn"),
    ],
)
def test_what_is_unknown_or_decided_by_the_plan_is_refused(words: str, said: str, hint: str) -> None:
    error = refusal(words)
    assert said in error.message
    assert "(flag --engine-arg)" in error.message
    assert hint in (error.hint or "")


PRESETS = [flag for flag in ENGINE.flags if flag.endswith(("-default", "-spec"))]


def test_the_engine_lists_its_presets() -> None:
    assert len(PRESETS) == 12
    assert "--fim-qwen-1.5b-default" in PRESETS


@pytest.mark.parametrize("flag", [*PRESETS, "--some-model-of-next-year-default"])
def test_a_preset_would_serve_another_model_than_the_planned_one(flag: str) -> None:
    name = "speculation" if flag == "--spec-default" else "model"
    engine = replace(ENGINE, flags=tuple({*ENGINE.flags, flag}))
    with pytest.raises(ConfigError) as caught:
        Space(resolve_settings({"engine_arg": f"--top-k 1 {flag}"}, {}), IMAGE, engine, machine(), SMALL)
    assert f"the setting {name} stands for: {flag}" in caught.value.message


def test_one_template_is_given_once(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    assert "--chat-template" in argv(space(engine_arg="--chat-template chatml").best)
    with pytest.raises(ConfigError) as caught:
        space(engine_arg="--chat-template chatml", chat_template_file=str(template))
    assert "the setting chat_template_file stands for: --chat-template (flag --engine-arg)" in caught.value.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grammar 'a\nb'", "contains a line break or another unprintable character: '--grammar 'a\\nb''"),
        ("--grammar a\0", "contains a line break or another unprintable character: '--grammar a\\x00'"),
        ("--grammar 'a", "has a quotation mark that is not closed"),
        ("20", "does not begin with a flag of the engine"),
        ("", "does not begin with a flag of the engine"),
    ],
)
def test_what_is_no_argument_is_refused_with_its_source(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings({}, {}, json.dumps({"engine_arg": ["--top-k 2", words]}))
    assert said in caught.value.message
    assert caught.value.message.endswith("(file appliance.yaml)")


def test_every_source_may_hold_several() -> None:
    text = "engine_arg:\n- --top-k 1\n- --no-warmup\nlora: [a.gguf, 'b.gguf:0.5']\n"
    of_file = resolve_settings({}, {}, text)
    assert of_file.engine_arg == ("--top-k", "1", "--no-warmup")
    assert of_file.lora == ("a.gguf", "b.gguf:0.5")
    of_variable = resolve_settings({}, {"APPLIANCE_ENGINE_ARG": "--top-k 2 --temp=0", "APPLIANCE_LORA": "c, d:2"}, text)
    assert of_variable.engine_arg == ("--top-k", "2", "--temp", "0")
    assert of_variable.lora == ("c", "d:2")
    of_flags = resolve_settings({"engine_arg": ["--top-k 3", "--mlock"]}, {"APPLIANCE_ENGINE_ARG": "--top-k 2"}, text)
    assert of_flags.engine_arg == ("--top-k", "3", "--mlock")


@given(st.text(alphabet="-=' \"abck02._", max_size=30))
def test_no_text_brings_a_flag_of_the_plan_to_the_engine(text: str) -> None:
    try:
        plan = space(engine_arg=f"--top-k 1 {text}").best
    except ConfigError:
        return
    passed = launch_of(plan).extras.engine_args
    assert not {word for word in passed if is_flag(word)} & {*OWNED, *UNOFFERED}
    assert not [word for word in passed if is_flag(word) and owner_of(word, resolve_settings({}, {}))]
    assert all(word in ENGINE.flags for word in passed if is_flag(word))


def entries() -> list[set[str]]:
    """Return the spellings of each entry in the engine's own help."""
    heads = [re.split(r"\s{2,}(?![\s-])", line, maxsplit=1)[0] for line in USAGE.splitlines() if line.startswith("-")]
    return [set(re.findall(r"(?:^|[\s,])(--?[A-Za-z][A-Za-z0-9-]*)", head)) for head in heads]


def test_a_flag_is_refused_in_every_spelling_or_in_none() -> None:
    owned = {*OWNED, *UNOFFERED}
    halved = [names for names in entries() if names & owned and not names <= owned]
    assert not halved


def test_every_flag_that_a_plan_uses_is_refused() -> None:
    words = re.findall(r"flags\.(?:need|use)\((\"--[a-z-]+\"|[A-Z_]+)", inspect.getsource(server))
    used = {word.strip('"') if word.startswith('"') else getattr(server, word) for word in words}
    assert len(used) > 30
    assert used - {*OWNED, *UNOFFERED} == {"--override-kv"}  # of other keys it may be given
    assert all(name in SETTINGS for name in OWNED.values())


def test_they_are_part_of_the_key() -> None:
    def key(**flags: str) -> Key:
        return make_key(resolve_settings(flags, {}), IMAGE, machine(), DIGEST)

    ids = {key(**flags).id for flags in ({}, {"engine_arg": "--top-k 1"}, {"reserve_mib": "512"}, {"lora": "a.gguf"})}
    assert len(ids) == 4


def test_a_plan_with_them_is_read_back_from_its_profile() -> None:
    plan = replace(space(engine_arg="--top-k 1", chat_template_file="/data/t.jinja").best, choices=())
    assert parse_plan(json.loads(json.dumps(asdict(plan)))) == plan


def test_template_and_thoughts_have_settings_of_their_own() -> None:
    plan = space(chat_template_file="/data/t.jinja", reasoning_format="deepseek").best
    words = argv(plan)
    assert words[words.index("--chat-template-file") + 1] == "/data/t.jinja"
    assert words[words.index("--reasoning-format") + 1] == "deepseek"
    assert choice(plan, "chat_template_file")[:2] == ("/data/t.jinja", "used instead of the model's own template")
    without = argv(space().best)
    assert not {"--chat-template-file", "--reasoning-format"} & set(without)


def test_memory_is_left_alone_on_each_card() -> None:
    usual, modest = on_card(), on_card(reserve_mib="4096")
    (before,), (after,) = usual.placement.shares, modest.placement.shares
    assert before.gpu.free_mib - after.gpu.free_mib == 4096
    assert after.memory.total <= after.gpu.free_mib
    assert modest.context < usual.context
    assert choice(modest, "reserve_mib") == ("4,096", "left alone of what is free on each GPU", "flag --reserve-mib")
    assert choice(space(reserve_mib="1").best, "reserve_mib")[1] == "there is no GPU to leave it on"


def test_a_card_that_is_left_alone_as_a_whole_is_not_used() -> None:
    assert not on_card(reserve_mib="65536").placement.shares


def projector(*, work_mib: float = 121.0, kind: str = "gemma3") -> Projector:
    return Projector(
        path=Path("/data/models/mmproj-F16.gguf"),
        kind=kind,
        reads=("image",),
        length=4096,
        weights_bytes=800 * MIB,
        work_bytes=int(work_mib * MIB),
        header_bytes=1000,
    )


def adapter(*, each: int = MIB, layers: int = 32) -> Adapter:
    return Adapter(
        path=Path("/data/models/style.gguf"),
        scale=0.5,
        layer_bytes=tuple((layer, each) for layer in range(layers)),
        other_bytes=2 * MIB,
        size=(layers * each) + 2 * MIB,
        header_bytes=1000,
    )


def of(machine_name: str, model: Model, **flags: str) -> Space:
    image, engine = facts(has_cuda=bool(MACHINES[machine_name].gpus.gpus))
    return Space(resolve_settings(flags, {}), image, engine, MACHINES[machine_name], model)


EIGHT = model("llama-3.1-8b", "Q4_K_M")
SEEING = replace(EIGHT, projector=projector())


@pytest.mark.parametrize(("work_mib", "counted"), [(121.0, 512.0), (700.0, 700.0), (5000.0, 1024.0)])
def test_a_projector_lies_on_the_first_card_with_room_to_work(work_mib: float, counted: float) -> None:
    seeing = replace(EIGHT, projector=projector(work_mib=work_mib))
    plain, found = of(CARD, EIGHT, ctx_size="32768").best, of(CARD, seeing, ctx_size="32768").best
    (before,), (after,) = plain.placement.shares, found.placement.shares
    assert after.memory.total - before.memory.total == pytest.approx(800 + counted)
    assert after.memory.overhead == pytest.approx(800 + counted)
    assert found.memory.overhead == plain.memory.overhead  # none of it on the host
    words = arguments(found, facts(has_cuda=True)[1], SOCKET)
    assert words[words.index("--mmproj") + 1] == "/data/models/mmproj-F16.gguf"
    assert "--no-mmproj-offload" not in words
    value, reason, source = choice(found, "mmproj")
    assert (value, source) == ("mmproj-F16.gguf", "beside the model")
    assert reason == f"image: 800 MiB on CUDA0, {counted:,.0f} more to work in; --mmproj off serves text alone"


def test_with_several_cards_only_the_first_holds_it() -> None:
    shares = of("2x2080ti-22g", replace(model("qwen3.6-27b", "Q8_0"), projector=projector())).best.placement.shares
    assert [share.memory.overhead for share in shares] == [pytest.approx(1312), 0.0]
    assert all(share.memory.total <= share.gpu.free_mib for share in shares)


def test_without_a_card_it_lies_in_host_memory() -> None:
    plain, found = of("cpu-16g", EIGHT, ctx_size="8192").best, of("cpu-16g", SEEING, ctx_size="8192").best
    assert found.memory.overhead - plain.memory.overhead == pytest.approx(800 + 121)
    assert found.memory.cache <= plain.memory.cache - 400  # which gives way
    assert choice(found, "mmproj")[1].startswith("image: 800 MiB in host memory, 121 more to work in")
    assert "--no-mmproj-offload" not in arguments(found, ENGINE, SOCKET)  # the engine sees no GPU


def test_an_engine_with_gpu_kernels_is_told_to_leave_it_on_the_host() -> None:
    _, engine = facts(has_cuda=True)
    found = of(CARD, SEEING, devices="none", ctx_size="4096").best
    assert "--no-mmproj-offload" in arguments(found, engine, SOCKET)


def test_a_card_without_room_for_it_holds_fewer_layers() -> None:
    plain, found = of("laptop-5060", EIGHT).best, of("laptop-5060", SEEING).best
    (share,) = found.placement.shares
    assert share.memory.total <= share.gpu.free_mib
    assert (found.context, found.placement.gpu_layers) < (plain.context, plain.placement.gpu_layers)


TIGHT = {"ctx_size": "20480"}
LARGE = replace(SEEING, projector=projector(work_mib=1000))


def test_a_projector_moves_to_the_host_before_the_model_is_refused() -> None:
    wide = replace(projector(), weights_bytes=2000 * MIB)
    found = of("laptop-5060", replace(EIGHT, projector=wide), ctx_size="4096", gpu_layers="33").best
    (share,) = found.placement.shares
    assert (share.layers, share.memory.overhead) == (33, 0.0)
    plain = of("laptop-5060", EIGHT, ctx_size="4096", gpu_layers="33").best
    assert found.memory.overhead - plain.memory.overhead == pytest.approx(2000 + 121)
    words = arguments(found, facts(has_cuda=True)[1], SOCKET)
    assert "--no-mmproj-offload" in words
    assert choice(found, "mmproj")[1].startswith("image: 2,000 MiB in host memory, 121 more to work in")


def test_a_projector_is_left_away_before_the_model_is_refused_and_that_is_said() -> None:
    space = of("cpu-limit-8g", LARGE, **TIGHT)
    (said,) = [each for each in space.best.choices if each.name == "mmproj"]
    assert said.is_refusal
    assert said.reason == (
        "mmproj-F16.gguf is left away, since the model does not fit beside it: no images or audio are read"
    )
    assert space.best.launch.reads == ()
    assert "--mmproj" not in argv(space.best)
    now = space.now(space.best)
    assert isinstance(now, Plan)
    assert launch_of(now).extras == launch_of(space.best).extras


def test_one_that_was_named_is_not_left_away() -> None:
    with pytest.raises(ModelDoesNotFitError) as caught:
        _ = of("cpu-limit-8g", LARGE, mmproj="mmproj-F16.gguf", **TIGHT).best
    assert "--mmproj off" in (caught.value.hint or "")
    assert of("cpu-limit-8g", EIGHT, **TIGHT).best.context == 20480


def test_the_projector_of_today_is_served_with_a_plan_of_earlier() -> None:
    earlier = of(CARD, SEEING).best
    now = of(CARD, replace(SEEING, projector=replace(projector(), path=Path("/mnt/mmproj.gguf")))).now(earlier)
    assert isinstance(now, Plan)
    assert launch_of(now).extras.projector == "/mnt/mmproj.gguf"


def test_that_it_was_turned_off_is_said() -> None:
    plan = space(mmproj="off").best
    assert choice(plan, "mmproj") == ("off", "asked for: the model is served for text alone", "flag --mmproj")
    assert "--mmproj" not in argv(plan)


def test_adapters_lie_with_their_layers_and_slow_every_token() -> None:
    changed = replace(EIGHT, adapters=(adapter(each=8 * MIB),))
    plain, found = of(CARD, EIGHT, ctx_size="16384").best, of(CARD, changed, ctx_size="16384").best
    (before,), (after,) = plain.placement.shares, found.placement.shares
    assert after.memory.weights - before.memory.weights == pytest.approx(32 * 8 + 2)
    assert plain.speed
    assert found.speed
    assert found.speed.decode_tokens_per_s < plain.speed.decode_tokens_per_s
    words = argv(found)
    assert words[words.index("--lora-scaled") + 1] == "/data/models/style.gguf:0.5"
    said = "258.0 MiB, with the layers that they change; every token reads them, too"
    assert choice(found, "lora")[:2] == ("style.gguf:0.5", said)


def test_adapters_of_layers_in_host_memory_are_counted_there() -> None:
    changed = replace(EIGHT, adapters=(adapter(), replace(adapter(), path=Path("/data/models/b.gguf"), scale=-1.0)))
    plain, found = of("cpu-16g", EIGHT, ctx_size="4096").best, of("cpu-16g", changed, ctx_size="4096").best
    assert found.memory.weights - plain.memory.weights == pytest.approx(2 * 34)
    words = argv(found)
    assert words[words.index("--lora-scaled") + 1] == "/data/models/style.gguf:0.5,/data/models/b.gguf:-1"


def test_the_loader_which_knows_no_adapters_does_not_take_them_off() -> None:
    found = of(CARD, replace(EIGHT, adapters=(adapter(each=8 * MIB),)), ctx_size="16384").best
    (share,) = found.placement.shares
    sizes = (share.memory.weights - 258, share.memory.kv, share.memory.compute)
    (refined,) = refine([found], [Projection(devices=(sizes,), host=(0, 0, 0))])
    assert refined.placement.shares[0].memory.weights == share.memory.weights
    (plain,) = refine([of(CARD, EIGHT, ctx_size="16384").best], [Projection(devices=(sizes,), host=(0, 0, 0))])
    assert plain.placement.shares[0].memory.weights == sizes[0]


def test_the_engines_log_counts_adapters_as_weights_and_no_buffer_of_a_projector() -> None:
    found = server.parse_allocated(
        (
            "0.00.017.196 I load_tensors:   CPU_Mapped model buffer size =     1.75 MiB",
            "0.00.128.990 I llama_adapter_lora_init_impl:        CPU LoRA buffer size =     0.25 MiB",
            "0.00.132.682 I sched_reserve:        CPU compute buffer size =     6.50 MiB",
            "0.00.325.573 I reserve_compute_meta:        CPU compute buffer size =   121.25 MiB",
        )
    )
    assert (found.model, found.compute) == (2.0, 6.5)


@pytest.mark.parametrize(
    ("pooling", "flags", "words"),
    [
        ("mean", {}, ("--embeddings",)),
        ("rank", {}, ("--reranking",)),
        ("last", {"pooling": "last"}, ("--embeddings", "--pooling", "last")),
        ("rank", {"pooling": "rank"}, ("--reranking",)),
    ],
)
def test_what_gives_vectors_or_scores_is_served_as_that(
    pooling: str, flags: dict[str, str], words: tuple[str, ...]
) -> None:
    of_scores = replace(SMALL, pooling=pooling, is_embedding_model=True)
    plan = Space(resolve_settings(flags, {}), IMAGE, ENGINE, machine(), of_scores).best
    assert server.pooling_arguments(plan, ENGINE) == words
    assert choice(plan, "pooling")[0] == pooling
    assert server.pooling_arguments(space().best, ENGINE) == ()


@pytest.mark.thorough
def test_a_model_that_reads_a_text_as_a_whole_has_a_batch_as_long_as_its_context(tmp_path: Path) -> None:
    found = read_model(write_bert(tmp_path / "m.gguf", MEAN, width=384, wide=1536, context=8192))
    plan = Space(resolve_settings({}, {}), IMAGE, ENGINE, machine(), found).best
    assert (plan.context, launch_of(plan).ubatch, launch_of(plan).batch) == (8192, 8192, 8192)
    # The engine's log: "sched_reserve: CPU compute buffer size = 212.22 MiB".
    assert 212.22 <= plan.memory.compute + plan.memory.output < 400
    assert choice(plan, "ubatch")[1] == "this model computes a text in one batch, and takes none that is longer"
    smaller = Space(resolve_settings({"ubatch": "256"}, {}), IMAGE, ENGINE, machine(), found).best
    assert (launch_of(smaller).ubatch, choice(smaller, "ubatch")[2]) == (256, "flag --ubatch")


@pytest.mark.parametrize(
    ("pooling", "is_causal", "is_whole"),
    [("mean", False, True), ("mean", True, True), ("last", True, False), ("rank", True, False), ("rank", False, True)],
)
def test_what_can_be_read_in_pieces_has_the_usual_batch(pooling: str, is_causal: bool, is_whole: bool) -> None:
    found = replace(SMALL, pooling=pooling, is_causal=is_causal, is_embedding_model=True)
    plan = Space(resolve_settings({}, {}), IMAGE, ENGINE, machine(), found).best
    assert (launch_of(plan).ubatch == min(plan.context, 8192)) == is_whole
