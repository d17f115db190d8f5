"""Named keys as the gateway finds them: when it looks at the file, and what it compares."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.errors import ConfigError
from appliance.gateway.accounts.accounts import LOOK_EVERY_S, PRESENTED_MAX, Accounts
from appliance.gateway.accounts.door import NamedDoor
from appliance.gateway.accounts.named_keys import KEYS_MAX, add_key, remove_key, rotate_key
from appliance.gateway.wire.api_error import ApiError
from appliance.system.detached import HANGS_S
from tests.unit.gateway.test_key_limits import Clock


async def name_of(accounts: Accounts, *presented: str) -> str | None:
    found = await accounts.find([key.encode() for key in presented])
    return found.name if found else None


async def test_a_changed_file_is_read_once_a_second_at_most(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    accounts = Accounts(path, clock)
    assert await name_of(accounts, "sk-x") is None, "there is no file"
    key = add_key(path, "ci", {})
    assert await name_of(accounts, key) is None, "it was looked at a moment ago"
    clock.now += LOOK_EVERY_S
    assert await name_of(accounts, key) == "ci"
    new = rotate_key(path, "ci")
    assert await name_of(accounts, key) == "ci"
    clock.now += LOOK_EVERY_S
    assert (await name_of(accounts, key), await name_of(accounts, new)) == (None, "ci")
    remove_key(path, "ci")
    clock.now += LOOK_EVERY_S
    assert await name_of(accounts, new) is None
    assert accounts.problem == ""


async def test_many_that_ask_at_once_share_one_look(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {name: add_key(path, name, {}) for name in ("a", "b", "c")}
    accounts = Accounts(path)
    found = await asyncio.gather(*(name_of(accounts, key) for key in keys.values() for _ in range(50)))
    assert [*dict.fromkeys(found)] == ["a", "b", "c"]


async def test_a_key_is_not_called_wrong_before_the_keys_were_read(tmp_path: Path) -> None:
    """A client takes 401 as final; the volume may answer in a moment."""
    goes_on = threading.Event()

    class Hanging(Accounts):
        def _look(self) -> None:
            assert goes_on.wait(60)
            super()._look()

    path, clock = tmp_path / "keys.json", Clock()
    key = add_key(path, "ci", {})
    accounts = Hanging(path, clock)
    door = NamedDoor(answer, accounts, work=("/v1/models",), free=(), below=())
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", f"Bearer {key}".encode())]}
    asking = asyncio.create_task(ask(door, scope))
    await asyncio.sleep(0)
    clock.now += 2 * HANGS_S
    second = await ask(door, scope)
    assert isinstance(second, ApiError)
    assert (second.status, second.code) == (503, "keys_unknown")
    goes_on.set()
    assert await asking is None
    wrong = await ask(door, {**scope, "headers": [(b"authorization", b"Bearer sk-wrong")]})
    assert isinstance(wrong, ApiError)
    assert (wrong.status, wrong.code) == (401, "invalid_api_key")


async def answer(_scope: Any, _receive: Any, _send: Any) -> None: ...


async def ask(door: NamedDoor, scope: dict[str, Any]) -> ApiError | None:
    try:
        await door(dict(scope), cast(Any, None), cast(Any, None))
    except ApiError as error:
        return error
    return None


async def test_of_many_presented_keys_only_a_few_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "ci", {})
    accounts = Accounts(path)
    assert await name_of(accounts, "sk-x", key) == "ci"
    assert await name_of(accounts, *["sk-x"] * PRESENTED_MAX, key) is None


async def test_nothing_is_a_key_but_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "ci", {})
    accounts = Accounts(path)
    digest = path.read_text().partition('"sha256": "')[2][:64]
    for other in ("", key[:-1], f"{key} ", key.upper(), digest, f"sk-{digest}", "ci"):
        assert await name_of(accounts, other) is None


async def test_use_is_kept_when_the_limits_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    key = add_key(path, "ci", {"streams": 1})
    accounts = Accounts(path, clock)
    before = await accounts.find([key.encode()])
    assert before is not None
    new = rotate_key(path, "ci")
    clock.now += LOOK_EVERY_S
    after = await accounts.find([new.encode()])
    assert after is not None
    assert accounts.meter(after) is accounts.meter(before)
    path.write_text("{}")
    for _ in range(3):
        clock.now += LOOK_EVERY_S
        assert await accounts.find([new.encode()]) is None
    assert [record.getMessage() for record in caplog.records] == [f"no named key is accepted: {accounts.problem}"]


def test_there_is_a_most_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    for number in range(KEYS_MAX):
        add_key(path, f"key{number}", {})
    with pytest.raises(ConfigError, match="there are 256 named keys, which is the limit"):
        add_key(path, "one-more", {})


async def test_each_container_counts_the_limits_of_a_key_for_itself(tmp_path: Path) -> None:
    """docs/api.md says so: two on one volume admit up to twice the limit together."""
    path, clock = tmp_path / "keys.json", Clock()
    presented = [add_key(path, "ci", {"requests_per_minute": 2}).encode()]
    for accounts in (Accounts(path, clock), Accounts(path, clock)):
        key = await accounts.find(presented)
        assert key is not None
        for _ in range(2):
            with accounts.meter(key).admitted(key):
                pass
        with pytest.raises(ApiError, match="limited to 2 requests a minute"), accounts.meter(key).admitted(key):
            pass
