"""The table of models that `appliance status` prints below the rest."""

from __future__ import annotations

from typing import Any

from appliance.host.verbs.status import Status, as_text

NOTHING = dict.fromkeys(Status.__dataclass_fields__)


def model(name: str, **more: Any) -> dict[str, Any]:
    asleep = {"is_loaded": False, "is_loading": False, "is_pinned": False, "answering": 0, "idle_s": None}
    return {"name": name, "state": "asleep", **asleep, "keep_alive_s": None, "holds_mib": {}, **more}


def loaded(name: str, **more: Any) -> dict[str, Any]:
    return model(name, **{"is_loaded": True, "state": "ready", "idle_s": 12.0, "holds_mib": {"host": 300}, **more})


def text_of(*models: dict[str, Any], waiting: tuple[dict[str, Any], ...] = ()) -> list[str]:
    fields: dict[str, Any] = {**NOTHING, "name": "one", "phase": "ready", "model": "a", "image": "i"}
    status = Status(**{**fields, "fleet": {"models": models, "waiting": waiting}})
    return as_text(status).splitlines()


def test_each_loaded_model_has_its_memory_and_its_time() -> None:
    lines = text_of(
        loaded("chat", holds_mib={"host": 1300, "GPU-0": 5000}, keep_alive_s=600.0),
        loaded("embed", is_pinned=True),
        loaded("small", answering=2, idle_s=None),
        loaded("large", holds_mib={"host": 0, "GPU-0": 9000}),
        model("other"),
    )
    assert lines[-6:] == [
        "models  state  memory                                 idle       keep",
        "chat    ready  1,300 MiB of host, 5,000 MiB of GPU-0  12 s       9 min 48 s more",
        "embed   ready  300 MiB of host                        12 s       pinned",
        "small   ready  300 MiB of host                        answers 2",
        "large   ready  9,000 MiB of GPU-0                     12 s       until its memory is needed",
        "1 more, which are loaded when they are asked for",
    ]


def test_who_waits_is_told_with_what_for() -> None:
    reason = "b fits when an answer has ended: a"
    wish = {"name": "b", "requests": 2, "seconds": 3.2, "reason": reason}
    lines = text_of(loaded("a", answering=1, idle_s=None), model("b"), waiting=(wish,))
    assert lines[-2:] == ["b       asleep", f"b: 2 waiting for 3.2 s: {reason}"]
    explicit = text_of(loaded("a"), model("b"), waiting=({**wish, "requests": 0},))
    assert explicit[-1] == f"b: to be loaded: {reason}"


def test_one_model_has_no_table() -> None:
    fields: dict[str, Any] = {**NOTHING, "name": "one", "phase": "ready", "model": "a", "image": "i"}
    assert "models" not in as_text(Status(**fields))
