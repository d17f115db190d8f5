"""The protocol of a model hub, as much as the real client speaks, from two addresses: the hub's and its CDN's.

Prints {"endpoint", "cdn"} and serves until its input ends. Each request is a line of --log: what was asked, whether a
token came with it, and how many bytes of a body are sent to a client that stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes.hub.repos import HubFile, names, read_repo

CHUNK = 256 * 1024
SIGNATURE = "a%2Bb%7Ec%3D%22d%22~e+f"  # which a client must hand on to the letter


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fake hub")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--cut-after", type=int, help="bytes of each body, then the connection is dropped")
    parser.add_argument("--cuts", type=int, default=10**9, help="so many bodies are cut, the rest is whole")
    parser.add_argument("--bytes-per-s", type=float, help="pace of bodies")
    parser.add_argument("--pace-until", type=Path, metavar="FILE", help="at full speed once the file is there")
    parser.add_argument("--stall-after", type=int, help="bytes of each body, then silence")
    parser.add_argument("--fail", action="append", default=[], metavar="WHAT=STATUS*TIMES", help="list, file or cdn")
    parser.add_argument("--hang", action="append", default=[], help="list or file: never answered")
    parser.add_argument("--drop-search", action="store_true", help="the connection is closed without an answer")
    parser.add_argument("--retry-after", help="beside each failure; `+2`: the date that is in so many seconds then")
    parser.add_argument("--gated", action="store_true", help="files answer 403 without a good token")
    parser.add_argument("--private", action="store_true", help="listings answer 401 without a good token")
    parser.add_argument("--token", default="hf_good", help="the good one")
    parser.add_argument("--no-ranges", action="store_true", help="always the whole file")
    parser.add_argument("--chunked", action="store_true", help="no Content-Length")
    parser.add_argument(
        "--short", type=int, default=0, help="bytes that every body lacks, and nobody says so: --chunked"
    )
    parser.add_argument("--no-redirect", action="store_true", help="the hub sends the bytes itself")
    parser.add_argument("--redirects", type=int, default=0, help="so many more of the hub to itself; -1 for ever")
    parser.add_argument("--flip-byte", type=int, help="the byte at this place of every body is another one")
    parser.add_argument("--listed-size", type=int, default=0, help="added to every size of a listing")
    parser.add_argument("--listed-sha256", help="of every file of a listing")
    parser.add_argument("--no-linked-headers", action="store_true", help="a mirror that tells no X-Linked-…")
    parser.add_argument("--page", action="store_true", help="every file is a proxy's page of HTML")
    return parser


class Hub:
    def __init__(self, knobs: argparse.Namespace) -> None:
        self.knobs = knobs
        self.cdn = ""
        self.cuts = knobs.cuts
        self.fails: dict[str, list[int]] = {}
        for word in knobs.fail:
            what, _, rest = word.partition("=")
            status, _, times = rest.partition("*")
            self.fails[what] = [int(status), int(times or 1)]

    def log(self, request: web.Request, status: int, sent: int = 0) -> None:
        row = {
            "host": "cdn" if self.cdn == f"http://{request.host}" else "hub",
            "method": request.method,
            "path": request.path,
            "range": request.headers.get("Range"),
            "authorization": request.headers.get("Authorization"),
            "status": status,
            "sent": sent,
            "at": time.monotonic(),
        }
        if self.knobs.log:
            with self.knobs.log.open("a") as file:
                print(json.dumps(row), file=file)

    def refused(self, request: web.Request, what: str) -> web.Response | None:
        status, left = self.fails.get(what, [0, 0])
        if not left:
            return None
        self.fails[what][1] = left - 1
        self.log(request, status)
        asked = self.knobs.retry_after or ""
        if asked.startswith("+"):
            asked = formatdate(time.time() + float(asked), usegmt=True)
        return web.Response(status=status, headers={"Retry-After": asked} if asked else {})

    async def hang(self, request: web.Request) -> None:
        self.log(request, 0)
        await asyncio.sleep(3600)

    def error(self, request: web.Request, status: int, code: str, message: str) -> web.Response:
        self.log(request, status)
        return web.json_response(
            {"error": message}, status=status, headers={"X-Error-Code": code, "X-Error-Message": message}
        )

    def is_known(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.knobs.token}"

    async def search(self, request: web.Request) -> web.Response:
        if self.knobs.drop_search:
            assert request.transport
            request.transport.abort()
        author, text = request.query.get("author", ""), request.query.get("search", "").lower()
        known = (name for name in names(self.knobs.folder) if text in name.lower())
        found = [name for name in known if not author or name.startswith(f"{author}/")]
        self.log(request, 200)
        return web.json_response([{"_id": "1", "id": name, "modelId": name} for name in found])

    async def info(self, request: web.Request) -> web.Response:
        if "list" in self.knobs.hang:
            await self.hang(request)
        if refused := self.refused(request, "list"):
            return refused
        name = f"{request.match_info['org']}/{request.match_info['name']}"
        repo = read_repo(self.knobs.folder, name)
        if repo is None or (self.knobs.private and not self.is_known(request)):
            return self.error(request, 401 if repo else 404, "RepoNotFound", "Repository not found")
        revision = request.match_info.get("revision", "main")
        if revision not in ("main", repo.commit):
            return self.error(request, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        changes: dict[str, Any] = {"size": self.knobs.listed_size}
        if self.knobs.listed_sha256:
            changes["sha256"] = self.knobs.listed_sha256
        self.log(request, 200)
        return web.json_response(repo.tree() if "/tree/" in request.path else repo.document(changes))

    async def file(self, request: web.Request) -> web.StreamResponse:
        """/ORG/NAME/resolve/REVISION/PATH: headers that tell of the file, and a redirect to the CDN."""
        if "file" in self.knobs.hang:
            await self.hang(request)
        if refused := self.refused(request, "file"):
            return refused
        repo = read_repo(self.knobs.folder, f"{request.match_info['org']}/{request.match_info['name']}")
        file = repo.file(request.match_info["path"]) if repo else None
        if repo is None or file is None:
            return self.error(request, 404, "EntryNotFound", "Entry not found")
        if self.knobs.gated and not self.is_known(request):
            status = 403 if "Authorization" in request.headers else 401
            return self.error(request, status, "GatedRepo", "Access to model is restricted")
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if file.is_lfs and not self.knobs.no_linked_headers:
            headers |= {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.etag}"'}
        step = int(request.query.get("step", "0"))
        if self.knobs.redirects < 0 or step < self.knobs.redirects:
            self.log(request, 302)
            return web.Response(status=302, headers=headers | {"Location": f"{request.path}?step={step + 1}"})
        if file.is_lfs and not self.knobs.no_redirect:
            self.log(request, 302)
            place = f"{self.cdn}/blob/{file.data_path.relative_to(self.knobs.folder)}?signature={SIGNATURE}"
            return web.Response(status=302, headers=headers | {"Location": place})
        return await self.send(request, file, headers)

    async def blob(self, request: web.Request) -> web.StreamResponse:
        if refused := self.refused(request, "cdn"):
            return refused
        if request.query_string and not request.raw_path.endswith(f"?signature={SIGNATURE}"):
            return self.error(request, 403, "", "The signature is of another address")
        org, name, path = request.match_info["path"].split("/", 2)
        repo = read_repo(self.knobs.folder, f"{org}/{name}")
        file = repo.file(path) if repo else None
        if file is None:
            return self.error(request, 404, "EntryNotFound", "Entry not found")
        return await self.send(request, file, {"ETag": f'"{file.sha256[:32]}"', "Accept-Ranges": "bytes"})

    async def send(self, request: web.Request, file: HubFile, headers: dict[str, str]) -> web.StreamResponse:
        if self.knobs.page:
            self.log(request, 200)
            return web.Response(text="<html>log in to this network</html>", content_type="text/html")
        begin, end, status = 0, file.size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        is_other = request.headers.get("If-Range") not in (None, headers["ETag"])
        if asked and not self.knobs.no_ranges and not is_other:
            begin = int(asked[1])
            end = min(int(asked[2]) + 1, end) if asked[2] else end
            if begin >= file.size:
                self.log(request, 416)
                return web.Response(status=416, headers={"Content-Range": f"bytes */{file.size}"})
            status = 206
            headers = headers | {"Content-Range": f"bytes {begin}-{end - 1}/{file.size}"}
        reply = web.StreamResponse(status=status, headers=headers)
        if self.knobs.chunked:
            reply.enable_chunked_encoding()
        else:
            reply.content_length = end - begin
        end = max(begin, end - self.knobs.short)
        limit = self.limit(end - begin)
        # Before the client can have all of it: its test looks here as soon as it has.
        self.log(request, status, (end - begin if limit is None else limit) if request.method == "GET" else 0)
        await reply.prepare(request)
        if request.method == "GET":
            with suppress(ConnectionResetError):  # the client is gone, which is what some tests do
                await self.body(reply, file, begin, end if limit is None else begin + limit)
        if limit is not None:
            assert request.transport
            await asyncio.sleep(0.02)  # what was written gets out before the end
            request.transport.close()
        return reply

    def limit(self, size: int) -> int | None:
        """Bytes after which this body is cut."""
        if self.knobs.cut_after is None or self.knobs.cut_after >= size or not self.cuts:
            return None
        self.cuts -= 1
        limit: int = self.knobs.cut_after
        return limit

    async def body(self, reply: web.StreamResponse, file: HubFile, begin: int, end: int) -> None:
        began = time.monotonic()
        for place in range(begin, end, CHUNK):
            if self.knobs.stall_after is not None and place - begin >= self.knobs.stall_after:
                await asyncio.sleep(3600)
            await reply.write(self.read(file, place, min(CHUNK, end - place)))
            if self.knobs.bytes_per_s:
                sent = min(place + CHUNK, end) - begin
                await self.wait_until(began + sent / self.knobs.bytes_per_s)

    async def wait_until(self, at: float) -> None:
        hurry = self.knobs.pace_until
        # The file is another process's to make: nothing here could tell of it.
        while (left_s := at - time.monotonic()) > 0 and not (hurry and hurry.exists()):  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, 0.05) if hurry else left_s)

    def read(self, file: HubFile, place: int, size: int) -> bytes:
        with file.data_path.open("rb", buffering=0) as source:
            data = bytearray(os.pread(source.fileno(), size, place))
        flipped = -1 if self.knobs.flip_byte is None else self.knobs.flip_byte - place
        if 0 <= flipped < len(data):
            data[flipped] ^= 0xFF
        return bytes(data)


class Switch:
    """The hub that is there now: a test's knobs take the place of the last one's, in a program that runs already."""

    def __init__(self, kind: type[Hub], parser: argparse.ArgumentParser) -> None:
        self.kind = kind
        self.parser = parser
        self.hub = kind(parser.parse_args())

    async def turn(self, request: web.Request) -> web.Response:
        hub = self.kind(self.parser.parse_args(await request.json()))
        hub.cdn = self.hub.cdn
        self.hub = hub
        return web.Response(status=204)

    def to(self, name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            reply: web.StreamResponse = await getattr(self.hub, name)(request)
            return reply

        return handle


async def serve(switch: Switch, routes: list[web.RouteDef]) -> None:
    """Serve on two ports until the input ends."""
    app = web.Application()
    app.add_routes([web.put("/.knobs", switch.turn), *routes])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    for _ in range(2):
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
    ports = [address[1] for address in runner.addresses]
    switch.hub.cdn = f"http://127.0.0.1:{ports[1]}"
    print(json.dumps({"endpoint": f"http://127.0.0.1:{ports[0]}", "cdn": switch.hub.cdn}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


def main() -> None:
    switch = Switch(Hub, arguments())
    routes = [
        web.get("/api/models", switch.to("search")),
        web.get("/api/models/{org}/{name}", switch.to("info")),
        web.get("/api/models/{org}/{name}/revision/{revision}", switch.to("info")),
        web.get("/api/models/{org}/{name}/tree/{revision}", switch.to("info")),
        web.get("/blob/{path:.+}", switch.to("blob")),
        web.get("/{org}/{name}/resolve/{revision}/{path:.+}", switch.to("file")),
    ]
    asyncio.run(serve(switch, routes))


if __name__ == "__main__":
    main()
