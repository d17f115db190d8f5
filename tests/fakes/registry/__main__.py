"""The protocol of a container registry, as much as pulling and pushing a model needs, with the fake hub's knobs too.

Prints {"endpoint", "cdn"} and serves until its input ends. FOLDER has blobs/HEX, and REPOSITORY/TAG for each manifest.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
from pathlib import Path

from aiohttp import web

from tests.fakes.hub.__main__ import Hub, Switch, serve
from tests.fakes.hub.__main__ import arguments as hub_arguments
from tests.fakes.hub.repos import HubFile

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MIB = 2**20


def arguments() -> argparse.ArgumentParser:
    parser = hub_arguments()
    parser.add_argument("--auth", choices=("bearer", "basic"), help="what is asked for; the token is --token")
    parser.add_argument("--account", help="user:password, without which there is no token and no answer")
    parser.add_argument("--realm", help="address of tokens (default: the registry's own)")
    parser.add_argument("--no-token", action="store_true", help="the token's server answers with a page")
    parser.add_argument("--redirect", action="store_true", help="blobs come from the other address")
    parser.add_argument("--huge-manifest", action="store_true", help="a manifest without an end")
    parser.add_argument("--other-manifest", action="store_true", help="a manifest by digest is another one")
    parser.add_argument("--lose-upload", type=int, default=0, help="so many uploads are dropped after a part")
    return parser


class Registry(Hub):
    def __init__(self, knobs: argparse.Namespace) -> None:
        super().__init__(knobs)
        self.folder: Path = knobs.folder
        self.losses: int = knobs.lose_upload

    def asks(self, request: web.Request, scope: str) -> web.Response | None:
        """Return the refusal of a request without a good login. A token is good for the scope that it was made for."""
        given = request.headers.get("Authorization", "")
        if self.knobs.auth is None:
            return None
        if self.knobs.auth == "basic":
            good, challenge = f"Basic {self.secret()}", 'Basic realm="here"'
        else:
            realm = self.knobs.realm or f"http://{request.host}/token"
            name = f"repository:{request.match_info['name']}:{scope}"
            good = f"Bearer {self.knobs.token}-{hashlib.sha256(name.encode()).hexdigest()}"
            challenge = f'Bearer realm="{realm}",service="fake",scope="{name}"'
        if given == good:
            return None
        self.log(request, 401)
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    def secret(self) -> str:
        return base64.b64encode((self.knobs.account or "").encode()).decode()

    async def token(self, request: web.Request) -> web.Response:
        if refused := self.refused(request, "token"):
            return refused
        if self.knobs.account and request.headers.get("Authorization") != f"Basic {self.secret()}":
            self.log(request, 401)
            return web.Response(status=401)
        self.log(request, 200)
        if self.knobs.no_token:
            return web.Response(text="<html>log in to this network</html>")
        scope = hashlib.sha256(request.query["scope"].encode()).hexdigest()
        return web.json_response({"token": f"{self.knobs.token}-{scope}"})

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        if refused := self.asks(request, "pull") or self.refused(request, "manifest"):
            return refused
        name, reference = request.match_info["name"], request.match_info["reference"]
        data = self.find(name, reference)
        self.log(request, 200 if data else 404)
        if self.knobs.huge_manifest:
            return await self.endless(request)
        if data is None:
            return web.json_response({"errors": [{"code": "MANIFEST_UNKNOWN"}]}, status=404)
        if self.knobs.other_manifest:
            data += b" "
        return web.Response(body=data, headers={"Content-Type": MANIFEST})

    async def endless(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": MANIFEST})
        await reply.prepare(request)
        while True:  # until the client goes away
            await reply.write(b" " * MIB)

    def find(self, name: str, reference: str) -> bytes | None:
        folder = self.folder / name
        found = {path.name: path.read_bytes() for path in folder.glob("*")} if folder.is_dir() else {}
        by_digest = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in found.values()}
        return found.get(reference) or by_digest.get(reference)

    async def layer(self, request: web.Request) -> web.StreamResponse:
        if refused := self.asks(request, "pull") or self.refused(request, "blob"):
            return refused
        path = self.folder / "blobs" / request.match_info["hex"]
        if not path.is_file():
            self.log(request, 404)
            return web.Response(status=404)
        if self.knobs.redirect and request.method == "GET":
            self.log(request, 307)
            return web.Response(status=307, headers={"Location": f"{self.cdn}/data/{path.name}?signature=a%2Bb"})
        return await self.send(request, _file(path), {"ETag": f'"{path.name}"'})

    async def data(self, request: web.Request) -> web.StreamResponse:
        return await self.send(request, _file(self.folder / "blobs" / request.match_info["hex"]), {"ETag": '"x"'})

    async def begin(self, request: web.Request) -> web.Response:
        if refused := self.asks(request, "pull,push") or self.refused(request, "upload"):
            return refused
        self.log(request, 202)
        return web.Response(
            status=202, headers={"Location": f"/v2/{request.match_info['name']}/blobs/uploads/1?_state=a%3D%3D"}
        )

    async def upload(self, request: web.Request) -> web.Response:
        if refused := self.asks(request, "pull,push"):
            return refused
        data = b""
        async for chunk in request.content.iter_any():
            data += chunk
            if self.losses and len(data) > 1000:
                self.losses -= 1
                self.log(request, 0, len(data))
                assert request.transport
                request.transport.abort()
        digest = hashlib.sha256(data).hexdigest()
        is_right = request.query["digest"] == f"sha256:{digest}" and "_state=a%3D%3D" in request.raw_path
        self.log(request, 201 if is_right else 400, len(data))
        if not is_right:
            return web.json_response({"errors": [{"code": "DIGEST_INVALID", "message": "not this"}]}, status=400)
        (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
        (self.folder / "blobs" / digest).write_bytes(data)
        return web.Response(status=201)

    async def put_manifest(self, request: web.Request) -> web.Response:
        if refused := self.asks(request, "pull,push") or self.refused(request, "tag"):
            return refused
        data = await request.read()
        rows = json.loads(data)
        blobs = [rows["config"], *rows["layers"]]
        has_all = all((self.folder / "blobs" / row["digest"].removeprefix("sha256:")).exists() for row in blobs)
        self.log(request, 201 if has_all else 400)
        if not has_all:
            return web.json_response({"errors": [{"code": "MANIFEST_BLOB_UNKNOWN"}]}, status=400)
        path = self.folder / request.match_info["name"] / request.match_info["reference"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return web.Response(status=201)


def _file(path: Path) -> HubFile:
    return HubFile(path=path.name, data_path=path, size=path.stat().st_size, sha256=path.name, git_sha1="")


def main() -> None:
    switch = Switch(Registry, arguments())
    routes = [
        web.get("/token", switch.to("token")),
        web.get("/data/{hex}", switch.to("data")),
        web.post("/v2/{name:.+}/blobs/uploads/", switch.to("begin")),
        web.put("/v2/{name:.+}/blobs/uploads/1", switch.to("upload")),
        web.get("/v2/{name:.+}/blobs/sha256:{hex}", switch.to("layer")),
        web.get("/v2/{name:.+}/manifests/{reference}", switch.to("manifest")),
        web.put("/v2/{name:.+}/manifests/{reference}", switch.to("put_manifest")),
    ]
    asyncio.run(serve(switch, routes))


if __name__ == "__main__":
    main()
