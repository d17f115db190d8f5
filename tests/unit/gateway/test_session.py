"""The cookie of a page's session: whose it is, when it ends, and what it may do."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.gateway.clients.session import LASTS_S, Sessions, is_own_origin

KEY = "sk-appliance-0123456789abcdef"
HOST = (b"host", b"box:11435")
OWN = (b"origin", b"http://box:11435")


def scope(method: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "method": method, "headers": [HOST, *headers]}


def cookie_of(sessions: Sessions) -> bytes:
    return sessions.cookie().partition(b";")[0]


def test_a_session_reads() -> None:
    sessions = Sessions(KEY)
    assert sessions.admits(scope("GET", (b"cookie", cookie_of(sessions))))
    assert sessions.admits(scope("HEAD", (b"cookie", b"theme=dark; " + cookie_of(sessions) + b"; x=y")))
    assert Sessions(KEY).admits(scope("GET", (b"cookie", cookie_of(sessions)))), "also after a restart"


@pytest.mark.parametrize(
    "origins",
    [
        (),
        ((b"origin", b"null"),),
        ((b"origin", b"http://box:9999"),),
        ((b"origin", b"http://box"),),
        ((b"origin", b"http://evil.example"),),
        ((b"origin", b"ftp://box:11435"),),
        ((b"origin", b"box:11435"),),
        (OWN, (b"origin", b"http://evil.example")),
    ],
)
def test_a_foreign_page_changes_nothing(origins: tuple[tuple[bytes, bytes], ...]) -> None:
    sessions = Sessions(KEY)
    assert not sessions.admits(scope("POST", (b"cookie", cookie_of(sessions)), *origins))


def test_our_own_page_may_change_something() -> None:
    sessions = Sessions(KEY)
    assert sessions.admits(scope("POST", (b"cookie", cookie_of(sessions)), OWN))
    assert sessions.admits(scope("POST", (b"cookie", cookie_of(sessions)), (b"origin", b"https://BOX:11435")))
    assert not sessions.admits(scope("POST", OWN))


def test_it_ends() -> None:
    now = [1_000_000.0]
    sessions = Sessions(KEY, clock=lambda: now[0])
    asked = scope("GET", (b"cookie", cookie_of(sessions)))
    now[0] += LASTS_S - 1
    assert sessions.admits(asked)
    now[0] += 2
    assert not sessions.admits(asked)


def test_another_key_ends_it() -> None:
    cookie = cookie_of(Sessions(KEY))
    other = Sessions(KEY + "x")
    name = cookie_of(other).partition(b"=")[0]
    assert not other.admits(scope("GET", (b"cookie", cookie)))
    assert not other.admits(scope("GET", (b"cookie", name + b"=" + cookie.partition(b"=")[2])))


@pytest.mark.parametrize("value", [b"", b".", b"9999999999.ab.", b"9999999999.ab.\xe9", b"x" * 4000, b"9999999999"])
def test_forged_cookies_are_refused(value: bytes) -> None:
    sessions = Sessions(KEY)
    name = cookie_of(sessions).partition(b"=")[0]
    assert not sessions.admits(scope("GET", (b"cookie", name + b"=" + value)))


def test_a_longer_time_is_not_believed() -> None:
    sessions = Sessions(KEY)
    name, _, value = cookie_of(sessions).partition(b"=")
    _, nonce, signature = value.split(b".")
    assert not sessions.admits(scope("GET", (b"cookie", name + b"=99999999999." + nonce + b"." + signature)))


def test_the_cookie_is_hidden_from_scripts_and_other_sites_and_holds_no_key() -> None:
    cookie = Sessions(KEY).cookie().decode()
    assert cookie.endswith(f"; Path=/; Max-Age={LASTS_S}; HttpOnly; SameSite=Strict")
    assert KEY not in cookie
    assert "Max-Age=0" in Sessions(KEY).ended().decode()


def test_a_request_to_two_hosts_has_no_origin_of_ours() -> None:
    assert not is_own_origin({"headers": [HOST, (b"host", b"other"), OWN]})
    assert not is_own_origin({"headers": [OWN]})


def test_only_a_few_cookies_are_tried() -> None:
    sessions = Sessions(KEY)
    name = cookie_of(sessions).partition(b"=")[0]
    many = b"; ".join([name + b"=9.9"] * 1000 + [cookie_of(sessions)])
    assert not sessions.admits(scope("GET", (b"cookie", many)))
    assert sessions.admits(scope("GET", (b"cookie", name + b"=9.9; " + cookie_of(sessions))))
