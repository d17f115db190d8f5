"""One-api, or its fork new-api, as far as a channel needs it: management, relay, and what surprises their users.

    python -m tests.fakes.one_api --access-token 0123456789abcdef0123456789abcdef

Prints its port at once and listens on it `--up-after` seconds later. What it does is read off the forks' code
(QuantumNous/new-api controller/channel.go at 029ddd4f, controller/token.go at 0533f389, controller/setup.go at
17795c94, controller/user.go at 0089a12f); neither was run. README.md compares it with one-api, route by route.
Failures are HTTP 200 with `success: false`; a route without its trailing slash is a redirect; a created channel's
answer has no id, and names are not unique; a search is by the beginning of a name. `GET /fake/state` shows everything.
Only the standard library is used.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

SLASHED = ("/api/channel", "/api/token", "/api/option", "/api/user")
# relay/controller/error.go and monitor/manage.go of one-api: what disables a channel where the switch is on.
DISABLING_TYPES = {"insufficient_quota", "authentication_error", "permission_error", "forbidden"}
DISABLING_CODES = {"invalid_api_key", "account_deactivated"}
DISABLING_WORDS = (
    "your access was terminated", "violation of our policies", "your credit balance is too low",
    "organization has been disabled", "credit", "balance", "permission denied", "organization has been restricted",
    "api key not valid", "api key expired", "已欠费",
)  # fmt: skip


class State:
    """What the database would hold, and what the knobs say."""

    def __init__(self, knobs: argparse.Namespace) -> None:
        self.knobs = knobs
        self.lock = threading.RLock()
        self.channels: list[dict[str, Any]] = []
        self.tokens: list[dict[str, Any]] = []
        self.options: dict[str, str] = {"RegisterEnabled": "true"}
        if knobs.disables:
            self.options["AutomaticDisableChannelEnabled"] = "true"
        self.requests: list[str] = []
        self.numbers = iter(range(1, 10_000))
        self.password = knobs.root_password
        self.is_set_up = knobs.kind == "one-api" or knobs.set_up
        self.sessions: dict[str, float] = {}  # when each ends
        self.logins = 0
        self.busy = knobs.busy
        self.collisions = 1 if knobs.postgres else 0
        self.synced = 0.0
        self.routable: list[dict[str, Any]] = []

    @property
    def is_new(self) -> bool:
        return bool(self.knobs.kind == "new-api")

    def is_session(self, given: str) -> bool:
        is_over = self.knobs.sessions_end is not None and self.knobs.sessions_end.exists()
        return not is_over and self.sessions.get(given, 0.0) > time.monotonic()

    def routes_for(self, model: str) -> dict[str, Any] | None:
        """With a cache of channels, what was there at the last sync."""
        channels = self.channels
        if self.knobs.cache_s:
            if time.monotonic() - self.synced >= self.knobs.cache_s:
                self.routable, self.synced = [dict(each) for each in self.channels], time.monotonic()
            channels = self.routable
        return next((c for c in channels if c["status"] == 1 and model in c["models"].split(",")), None)

    def document(self) -> dict[str, Any]:
        return {
            "channels": self.channels,
            "tokens": self.tokens,
            "options": self.options,
            "password": self.password,
            "logins": self.logins,
            "requests": self.requests,
        }


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, state: State) -> None:
        super().__init__((state.knobs.host, port), Handler)
        self.state = state

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def do_PUT(self) -> None:
        self.answer("PUT")

    def do_DELETE(self) -> None:
        self.answer("DELETE")

    @property
    def state(self) -> State:
        return self.server.state

    def answer(self, method: str) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/fake/state":
            return self.send(200, self.state.document())
        with self.state.lock:
            self.state.requests.append(f"{method} {parts.path}")
        if parts.path.startswith("/v1/"):
            return self.relay(method, parts.path)
        if parts.path in SLASHED:
            return self.send(301 if method == "GET" else 307, None, {"Location": f"{parts.path}/"})
        if self.state.busy > 0:
            self.state.busy -= 1
            return self.send(429, None)
        if self.state.knobs.fail and self.state.knobs.fail in f"{method} {parts.path}":
            return self.refuse(self.state.knobs.fail_message)
        with self.state.lock:
            return self.manage(method, parts.path)

    # Management

    def manage(self, method: str, path: str) -> None:
        open_routes: dict[str, Callable[[], None]] = {
            "GET /api/status": lambda: self.accept({"version": "fake", "system_name": "One API"}),
            "POST /api/user/login": self.login,
        }
        if self.state.is_new:
            open_routes |= {
                "GET /api/setup": lambda: self.accept({"status": self.state.is_set_up}),
                "POST /api/setup": self.set_up,
            }
        what = f"{method} {path}"
        if what in open_routes:
            return open_routes[what]()
        if not self.is_signed_in():
            return None
        routes: dict[str, Callable[[], None]] = {
            "GET /api/user/self": lambda: self.accept({"id": 1, "username": "root", "role": 100}),
            "PUT /api/user/self": self.change_password,
            "PUT /api/option/": self.set_option,
            "GET /api/channel/search": lambda: self.search(self.state.channels),
            "POST /api/channel/": self.add_channel,
            "PUT /api/channel/": self.change_channel,
            "GET /api/token/search": lambda: self.search(self.state.tokens),
            "POST /api/token/": self.add_token,
        }
        words = path.split("/")
        if self.state.is_new and not self.state.knobs.old and len(words) == 5 and method == "POST":
            routes[f"POST /api/channel/{words[3]}/status"] = lambda: self.set_status(int(words[3]))
            routes[f"POST /api/token/{words[3]}/key"] = lambda: self.show_key(int(words[3]))
        if what not in routes:
            error = {"message": f"Invalid URL ({what})", "type": "invalid_request_error", "param": "", "code": ""}
            return self.send(404, {"error": error})
        return routes[what]()

    def is_signed_in(self) -> bool:
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        cookie = (self.headers.get("Cookie") or "").removeprefix("session=")
        knobs = self.state.knobs
        if self.state.is_new and knobs.old and not self.headers.get("New-Api-User"):
            self.send(401, {"success": False, "message": "无权进行此操作，未提供 New-Api-User"})
            return False
        known = {knobs.access_token} - {None, ""} if not knobs.old_volume else set()
        if given in known or any(self.state.is_session(each) for each in (given, cookie)):
            return True
        if not given and not cookie:
            self.send(401, {"success": False, "message": "无权进行此操作，未登录且未提供 access token"})
        elif self.state.is_new and not knobs.old:
            self.send(401, {"success": False, "code": "AUTH_UNAUTHORIZED", "message": "access token 无效"})
        else:
            self.refuse("无权进行此操作，access token 无效")
        return False

    def login(self) -> None:
        self.state.logins += 1
        if self.state.logins > self.state.knobs.login_limit:
            return self.send(429, None)
        given = self.json()
        if not self.state.is_set_up or given != {"username": "root", "password": self.state.password}:
            return self.refuse("用户名或密码错误，或用户已被封禁")
        if self.state.knobs.second_factor:
            return self.accept({"require_2fa": True, "flow_token": "x"})
        session = secrets.token_hex(16)
        self.state.sessions[session] = time.monotonic() + self.state.knobs.session_s
        user = {"id": 1, "username": "root", "role": 100, "status": 1}
        if self.state.is_new and not self.state.knobs.old:
            return self.accept({"access_token": session, "token_type": "Bearer", "user": user})
        return self.accept(user, {"Set-Cookie": f"session={session}; Path=/; Max-Age=2592000; HttpOnly"})

    def set_up(self) -> None:
        given = self.json()
        if self.state.is_set_up:
            return self.refuse("系统已经初始化完成")
        if len(given["password"]) < 8 or given["password"] != given["confirmPassword"] or len(given["username"]) > 12:
            return self.refuse("密码长度至少为8个字符")
        self.state.is_set_up, self.state.password = True, given["password"]
        self.state.options["SelfUseModeEnabled"] = str(given["SelfUseModeEnabled"]).lower()
        return self.accept(None)

    def change_password(self) -> None:
        password = self.json()["password"]
        if not 8 <= len(password) <= 20:
            return self.refuse("输入不合法 Key: 'User.Password' Error:Field validation for 'Password' failed")
        self.state.password = password
        return self.accept(None)

    def set_option(self) -> None:
        given = self.json()
        if not isinstance(given["value"], str):
            return self.refuse("json: cannot unmarshal into Go struct field Option.value of type string")
        self.state.options[given["key"]] = given["value"]
        return self.accept(None)

    def search(self, rows: list[dict[str, Any]]) -> None:
        """Answer rows whose name begins with the keyword, and the channel whose id it is. Keys of channels are left
        out; new forks mask keys of tokens."""
        wanted = self.query.get("keyword", "")
        by_id = wanted if rows is self.state.channels else None
        found = [row for row in reversed(rows) if row["name"].startswith(wanted) or str(row["id"]) == by_id]
        shown = [self.shown(row) for row in found]
        if not self.state.is_new or (self.state.knobs.old and rows is self.state.tokens):
            return self.accept(shown)
        page, size = int(self.query.get("p", 1)), int(self.query.get("page_size", 20))
        size = min(size, 100)
        return self.accept({"items": shown[(page - 1) * size : page * size], "total": len(shown), "page": page})

    def shown(self, row: dict[str, Any]) -> dict[str, Any]:
        if "models" in row:
            return {name: value for name, value in row.items() if name != "key"}
        is_masked = self.state.is_new and not self.state.knobs.old
        return {**row, "key": f"{row['key'][:4]}**********{row['key'][-4:]}"} if is_masked else row

    def add_channel(self) -> None:
        given = self.json()
        if self.state.is_new:
            if given.get("mode") != "single":
                return self.refuse("不支持的添加模式")
            given = given["channel"]
        keys = [key for key in given.get("key", "").split("\n") if key]
        if not keys:
            return self.refuse("empty slice found")
        for _ in range(2 if self.state.knobs.twice else 1):
            self.state.channels.append({"status": 1, "group": "default", **given, "id": next(self.state.numbers)})
        return self.accept(None, status=201 if self.state.is_new and not self.state.knobs.old else 200)

    def change_channel(self) -> None:
        given = self.json()
        if self.state.is_new and not self.state.knobs.old and "status" in given:
            return self.refuse("无效的参数")
        found = next((row for row in self.state.channels if row["id"] == given.get("id")), None)
        if found is None:  # one-api changes no row, and answers with what it was given
            return self.refuse("record not found") if self.state.is_new else self.accept(given)
        found |= {name: value for name, value in given.items() if value not in ("", 0, None) or name in ("base_url",)}
        return self.accept(self.shown(found))

    def set_status(self, number: int) -> None:
        found = next(row for row in self.state.channels if row["id"] == number)
        found["status"] = self.json()["status"]
        return self.accept(True)

    def add_token(self) -> None:
        given = self.json()
        if len(given["name"].encode()) > (50 if self.state.is_new else 30):
            return self.refuse("令牌名称过长" if self.state.is_new else "参数错误：令牌名称过长")
        if self.state.collisions:
            self.state.collisions -= 1
            return self.refuse('ERROR: duplicate key value violates unique constraint "tokens_pkey"')
        token = {**given, "id": next(self.state.numbers), "user_id": 1, "status": 1, "key": secrets.token_hex(24)}
        self.state.tokens.append(token)
        return self.accept(None if self.state.is_new else token)

    def show_key(self, number: int) -> None:
        found = next(row for row in self.state.tokens if row["id"] == number)
        return self.accept({"key": found["key"]})

    # Relay

    def relay(self, method: str, path: str) -> None:
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ").removeprefix("sk-").partition("-")[0]
        if not any(token["key"] == given and token["status"] == 1 for token in self.state.tokens):
            return self.fail(401, "无效的令牌", "one_api_error")
        if (method, path) == ("GET", "/v1/models"):
            with self.state.lock:
                names = {n for c in self.state.channels for n in c["models"].split(",") if self.state.routes_for(n)}
            return self.send(200, {"object": "list", "data": [{"id": name} for name in sorted(names)]})
        model = self.json().get("model", "")
        with self.state.lock:
            channel = self.state.routes_for(model)
        if channel is None:
            return self.fail(503, f"当前分组 default 下对于模型 {model} 无可用渠道", "one_api_error")
        return self.forward(channel, path)

    def forward(self, channel: dict[str, Any], path: str) -> None:
        """To base and path as they are: a slash too many stays. Of the client's headers none goes on."""
        base = urlsplit(channel["base_url"])
        connection = http.client.HTTPConnection(base.hostname or "", base.port or 80, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {channel['key']}"}
        try:
            connection.request("POST", f"{base.path}{path}", self.body, headers)
            response = connection.getresponse()
            data = response.read()
        except OSError:
            return self.fail(500, "do request failed", "one_api_error", "do_request_failed")
        finally:
            connection.close()
        if response.status in (200, 201):
            return self.send_bytes(response.status, data, {"Content-Type": response.headers["Content-Type"]})
        return self.upstream_failed(channel, response.status, data)

    def upstream_failed(self, channel: dict[str, Any], status: int, data: bytes) -> None:
        """The upstream's error with its status; Retry-After and every other header are gone."""
        error = json.loads(data).get("error", {})
        if self.state.options.get("AutomaticDisableChannelEnabled") == "true" and is_disabling(status, error):
            channel["status"] = 3
        words = "当前分组上游负载已饱和，请稍后再试" if status == 429 else error.get("message", "")
        return self.fail(status, words, error.get("type", ""), error.get("code", ""))

    # Answers

    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document

    def accept(self, data: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
        self.send(status, {"success": True, "message": "", "data": data}, headers)

    def refuse(self, message: str) -> None:
        self.send(200, {"success": False, "message": message})

    def fail(self, status: int, message: str, kind: str, code: str = "") -> None:
        error = {"message": f"{message} (request id: 1)", "type": kind, "param": "", "code": code}
        self.send(status, {"error": error})

    def send(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        # Without blanks, as Go writes it: the health checks of the compose files look for `"success":true`.
        data = b"" if document is None else json.dumps(document, separators=(",", ":")).encode()
        self.send_bytes(status, data, {"Content-Type": "application/json; charset=utf-8", **(headers or {})})

    def send_bytes(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def is_disabling(status: int, error: dict[str, Any]) -> bool:
    words = str(error.get("message", "")).lower()
    return (
        status == 401
        or error.get("type") in DISABLING_TYPES
        or error.get("code") in DISABLING_CODES
        or any(word in words for word in DISABLING_WORDS)
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def parse_knobs() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--kind", choices=("one-api", "new-api"), default="one-api")
    parser.add_argument("--old", action="store_true", help="new-api of 2025: cookies, lists, whole keys")
    parser.add_argument("--up-after", type=float, default=0.0, help="seconds in which nothing listens")
    parser.add_argument("--access-token", help="INITIAL_ROOT_ACCESS_TOKEN")
    parser.add_argument("--old-volume", action="store_true", help="whose root has another access token")
    parser.add_argument("--root-password", default="123456")
    parser.add_argument("--set-up", action="store_true", help="new-api's first questions were answered before")
    parser.add_argument("--session-s", type=float, default=3600.0, help="a login lasts so long")
    parser.add_argument("--sessions-end", type=Path, metavar="FILE", help="no login is good once the file is there")
    parser.add_argument("--second-factor", action="store_true")
    parser.add_argument("--login-limit", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0, help="so many answers of 429 without a body come first")
    parser.add_argument("--postgres", action="store_true", help="the first token collides")
    parser.add_argument("--twice", action="store_true", help="somebody else creates the same channel")
    parser.add_argument("--cache-s", type=float, default=0.0, help="channels are routed to after the next sync")
    parser.add_argument("--disables", action="store_true", help="AutomaticDisableChannelEnabled")
    parser.add_argument("--fail", help="`METHOD /path`, or a part of it, that is refused")
    parser.add_argument("--fail-message", default="数据库错误")
    return parser.parse_args()


def main() -> None:
    knobs = parse_knobs()
    port = knobs.port or free_port()
    print(port, flush=True)
    time.sleep(knobs.up_after)
    Server(port, State(knobs)).serve_forever()


if __name__ == "__main__":
    main()
