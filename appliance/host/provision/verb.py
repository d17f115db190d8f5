"""python3 -m appliance.host.provision: makes an appliance a channel of one-api or new-api, with a token for its users.

Waits for both servers, creates or updates what differs from the wanted state, and reports what it did. A second run
changes nothing. With --follow it keeps running and updates the channel if the appliance's models or context change.

`secrets FOLDER` creates the secrets that the compose files need; `check FOLDER` refuses invalid ones.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.errors import ConfigError, EngineNotReadyError, FatalError, UsageError
from appliance.host.docker.endpoint import parse_url
from appliance.host.docker.http import Gateway, NoAnswerError
from appliance.host.provision.admin import SignedIn, sign_in
from appliance.host.provision.api import Api, RefusedError
from appliance.host.provision.channel import Wanted
from appliance.host.provision.reconcile import ChannelDone, TokenDone, is_listed, reconcile_channel, reconcile_token
from appliance.host.provision.secret import check_folder, make_secrets, read_secret
from appliance.host.provision.served import Served, query_served, readiness
from appliance.host.provision.wait import until_ready, until_up
from appliance.values import dataclass

DESCRIPTION = __doc__
NAME_LENGTH = 30  # longest name of a token in one-api


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("secrets", "check"), help="default: provision")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="folder of the secrets, with secrets and check")
    parser.add_argument("--one-api", metavar="URL", default="http://one-api:3000", help="URL of one-api or new-api")
    words = "URL at which one-api and this program reach it"
    parser.add_argument("--appliance", metavar="URL", default="http://appliance:11435", help=words)
    parser.add_argument(
        "--key-file", metavar="FILE", type=Path, help="the appliance's key: secrets/api_key on its volume"
    )
    parser.add_argument(
        "--access-token-file", metavar="FILE", type=Path, help="root's access token for the management API"
    )
    words = "root's password; a new database gets it as root's password"
    parser.add_argument("--root-password-file", metavar="FILE", type=Path, help=words)
    parser.add_argument("--channel", metavar="NAME", default="appliance", help="default: appliance")
    parser.add_argument("--token", metavar="NAME", default="appliance", help="default: appliance")
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="file to write the token's key to")
    parser.add_argument(
        "--wait-s", metavar="N", type=float, default=300.0, help="seconds to wait for one-api; default: 300"
    )
    parser.add_argument(
        "--model-wait-s", metavar="N", type=float, default=86400.0, help="seconds to wait for the model; default: a day"
    )
    parser.add_argument(
        "--follow", action="store_true", help="keep running and follow changes of the appliance's models"
    )
    parser.add_argument(
        "--every-s", metavar="N", type=float, default=30.0, help="seconds between checks with --follow; default: 30"
    )
    words = "least seconds between logins, of which one-api allows 20 in 20 minutes; default: 120"
    parser.add_argument("--login-every-s", metavar="N", type=float, default=120.0, help=words)
    parser.add_argument("--ready-file", metavar="FILE", type=Path, help="file created once the channel is up to date")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, for scripts")


def run(options: argparse.Namespace) -> int:
    if options.action:
        return _of_secrets(options)
    if options.folder:
        message = f"unknown argument: {options.folder}"
        raise UsageError(message)
    signal.signal(signal.SIGTERM, _end)
    try:
        Provision(options).run()
    except NoAnswerError as error:
        message = f"the server stopped answering: {error}"
        raise EngineNotReadyError(message, hint="start again: finished steps are not repeated") from error
    except RefusedError as error:
        message = f"one-api refuses: {error}"
        raise ConfigError(message, hint="see its log; docs/one-api.md lists the known versions") from error
    return 0


def _end(_number: int, _frame: object) -> None:
    sys.exit(0)


def _of_secrets(options: argparse.Namespace) -> int:
    if not options.folder:
        message = f"a folder is missing: {options.action} FOLDER"
        raise UsageError(message)
    folder = Path(options.folder)
    found = make_secrets(folder) if options.action == "secrets" else dict.fromkeys(check_folder(folder), "right")
    if options.json:
        print(json.dumps({"folder": str(folder), "secrets": found}))
    else:
        print("\n".join(f"{word:<6} {folder / name}" for name, word in found.items()))
    return 0


@dataclass(frozen=True, kw_only=True)
class Done:
    """What one pass did. `is_listed` is True if clients with the token are offered the models."""

    signed_in: SignedIn
    served: Served
    channel: ChannelDone
    token: TokenDone
    is_listed: bool


class Provision:
    """One run of the verb: its options and the signed-in session."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._appliance = _gateway(options.appliance, "--appliance")
        front = _gateway(options.one_api, "--one-api")
        self._api = Api(host=front.host, port=front.port, headers={})
        self._access_token = _secret(options.access_token_file)
        self._root_password = _secret(options.root_password_file)
        _check(options)

    def run(self) -> None:
        """Provision once, and follow if asked to. Raises FatalError, RefusedError, NoAnswerError."""
        ready_file: Path | None = self._options.ready_file
        if ready_file:
            ready_file.unlink(missing_ok=True)
        version = until_up(self._api, self._options.wait_s, self._say)
        until_ready(self._appliance, self._options.model_wait_s, self._say)
        done = self._once()
        self._tell(done, version)
        if ready_file:
            ready_file.touch()
        if self._options.follow:
            self._follow(done)

    def _once(self) -> Done:
        signed_in = self._signed_in()
        served = query_served(self._appliance, self._options.key_file)
        channel = reconcile_channel(signed_in.admin, self._wanted(served))
        token = reconcile_token(signed_in.admin, self._options.token, self._options.token_file)
        offers = "left disabled" not in (channel.did, token.did)
        listed = offers and is_listed(signed_in.admin, token, served.models)
        return Done(signed_in=signed_in, served=served, channel=channel, token=token, is_listed=listed)

    def _wanted(self, served: Served) -> Wanted:
        return Wanted(
            name=self._options.channel,
            base_url=self._appliance.base,
            models=served.models,
            context=served.context,
            key=served.key,
        )

    def _follow(self, done: Done) -> None:
        """Check repeatedly until the process is ended. Each problem is reported once and retried."""
        signed_in, signed_in_s, trouble = done.signed_in, time.monotonic(), ""
        while True:
            time.sleep(self._options.every_s)
            try:
                trouble = self._tell_trouble(trouble, self._pass(signed_in))
                continue
            except NoAnswerError as error:
                trouble = self._tell_trouble(trouble, f"the server does not answer: {error}")
            except FatalError as error:
                trouble = self._tell_trouble(trouble, error.message)
            except RefusedError as error:
                if time.monotonic() - signed_in_s < self._options.login_every_s:
                    trouble = self._tell_trouble(trouble, f"one-api refuses: {error}")
                    continue
                signed_in_s = time.monotonic()  # an expired login is normal and not reported
                signed_in, trouble = self._signed_in_again(signed_in, trouble)

    def _pass(self, signed_in: SignedIn) -> str:
        """Do one pass. Returns what prevents it, or "". Raises FatalError, RefusedError, NoAnswerError."""
        document = readiness(self._appliance)
        if document.get("status") != "ready":  # the appliance itself tells clients what it is doing
            return f"the appliance is not ready ({document.get('phase', 'no answer')}), the channel stays"
        served = query_served(self._appliance, self._options.key_file)
        channel = reconcile_channel(signed_in.admin, self._wanted(served))
        if channel.did == "created":  # the channel or the whole database was deleted, and then the token is missing too
            reconcile_token(signed_in.admin, self._options.token, self._options.token_file)
        if channel.did != "unchanged" and (channel.did != "left disabled" or channel.fields):
            self._tell_channel(channel, served)
        return ""

    def _signed_in_again(self, before: SignedIn, trouble: str) -> tuple[SignedIn, str]:
        try:
            return self._signed_in(), trouble
        except NoAnswerError as error:
            words = f"the server does not answer: {error}"
        except RefusedError as error:
            words = f"one-api refuses: {error}"
        except FatalError as error:
            words = error.message
        return before, self._tell_trouble(trouble, words)

    def _signed_in(self) -> SignedIn:
        return sign_in(self._api, access_token=self._access_token, root_password=self._root_password)

    def _tell(self, done: Done, version: str) -> None:
        kind = done.signed_in.admin.kind
        if self._options.json:
            print(json.dumps(_document(done, version, self._options)), flush=True)
            return
        rows = [
            (kind, f"{version} at {self._api.url}"),
            ("channel", _channel_words(self._options.channel, done.channel, done.served)),
            ("token", _token_words(self._options, done.token)),
            *(("set up", words) for words in done.signed_in.set_up),
            ("models", "offered to clients" if done.is_listed else _not_listed(done)),
        ]
        print("\n".join(f"{name:<8} {words}" for name, words in rows), flush=True)

    def _tell_channel(self, channel: ChannelDone, served: Served) -> None:
        if self._options.json:
            print(json.dumps({"channel": _channel_document(self._options.channel, channel, served)}), flush=True)
        else:
            print(f"channel  {_channel_words(self._options.channel, channel, served)}", flush=True)

    def _tell_trouble(self, before: str, words: str) -> str:
        if words and words != before:
            self._say(f"{words}; retrying")
        return words

    @staticmethod
    def _say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)


def _gateway(url: str, flag: str) -> Gateway:
    parts = urlsplit(parse_url(url))
    if parts.scheme != "http":
        message = f"not an http address: {url} ({flag})"
        raise UsageError(message, hint="as in http://appliance:11435; TLS belongs in front of one-api")
    return Gateway(host=parts.hostname or "", port=parts.port or 80)


def _secret(path: Path | None) -> str | None:
    return read_secret(path) if path else None


def _check(options: argparse.Namespace) -> None:
    if not (options.access_token_file or options.root_password_file):
        message = "no access token and no password for one-api's management was given"
        raise UsageError(message, hint="give --access-token-file FILE, --root-password-file FILE, or both")
    for flag in ("channel", "token"):
        name = getattr(options, flag)
        if not name.strip() or len(name) > NAME_LENGTH:
            message = f"--{flag} takes a name of 1 to {NAME_LENGTH} characters: '{name}'"
            raise UsageError(message)
    for flag, least in (("wait_s", 0.0), ("model_wait_s", 0.0), ("every_s", 0.05), ("login_every_s", 0.0)):
        if not getattr(options, flag) >= least:
            message = f"--{flag.replace('_', '-')} takes seconds, {least:g} at least: {getattr(options, flag)}"
            raise UsageError(message)


def _context(served: Served) -> str:
    return f"context {served.context:,}" if served.context else "context unknown"


def _channel_words(name: str, channel: ChannelDone, served: Served) -> str:
    fields = f" ({', '.join(channel.fields)})" if channel.did == "updated" else ""
    hint = "; enable it in the console" if channel.did == "left disabled" else ""
    models = ", ".join(served.models)
    return f"{channel.did}{fields}: {name}, id {channel.id}, {models}, {_context(served)}{hint}"


def _token_words(options: argparse.Namespace, token: TokenDone) -> str:
    where = f", key in {options.token_file}" if options.token_file else ", key in the console"
    return f"{token.did}: {options.token}, id {token.id}{where}"


def _not_listed(done: Done) -> str:
    if "left disabled" in (done.channel.did, done.token.did):
        return "not offered: the channel or the token was disabled by hand"
    return "not offered yet: one-api's cache of channels delays it until the next SYNC_FREQUENCY"


def _channel_document(name: str, channel: ChannelDone, served: Served) -> dict[str, Any]:
    about = {"name": name, "id": channel.id, "did": channel.did, "fields": list(channel.fields)}
    return {**about, "models": list(served.models), "context": served.context}


def _document(done: Done, version: str, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "one_api": {"kind": done.signed_in.admin.kind, "version": version},
        "channel": _channel_document(options.channel, done.channel, done.served),
        "token": {
            "name": options.token,
            "id": done.token.id,
            "did": done.token.did,
            "file": str(options.token_file) if options.token_file else None,
            "written": done.token.is_written,
        },
        "set_up": list(done.signed_in.set_up),
        "listed": done.is_listed,
    }
