"""Secrets in files: creates them, and refuses invalid ones before anything starts with them."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from appliance.errors import ConfigError
from appliance.values import dataclass

WORLD = 0o007


@dataclass(frozen=True, kw_only=True)
class Rule:
    form: str  # regular expression for the whole secret
    words: str  # the rule in words
    make: Callable[[], str]


_LETTERS = Rule(form=r"[A-Za-z0-9]{16,64}", words="16 to 64 letters and digits", make=lambda: secrets.token_hex(24))
# one-api stores 32 characters of the access token; with a longer token it silently fails to create the root user. Its
# passwords have 8 to 20 characters. Database passwords become part of a DSN, so they must not contain characters that
# need escaping there.
RULES: Mapping[str, Rule] = MappingProxyType({
    "access_token": Rule(form="[0-9a-f]{32}", words="32 hexadecimal digits", make=lambda: secrets.token_hex(16)),
    "root_password": Rule(
        form=r"[\x21-\x7e]{8,20}", words="8 to 20 printable characters", make=lambda: secrets.token_urlsafe(15)
    ),
    "session_secret": Rule(
        form=r"(?!random_string$)[\x21-\x7e]{16,128}",
        words="16 to 128 printable characters",
        make=lambda: secrets.token_hex(32),
    ),
    "database_password": _LETTERS,
    "database_root_password": _LETTERS,
})  # fmt: skip


def read_secret(path: Path) -> str:
    """Return the secret. Raises ConfigError for a file that is missing, empty, open to all users, or not of the form
    that its name requires. No message contains the secret."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        message = f"the secret file cannot be read: {path}: {_why(error)}"
        raise ConfigError(message, hint=f"the file must exist and be readable by user {os.getuid()}") from error
    if mode & WORLD:
        message = f"the secret file is open to every user of the machine: {path}: mode {mode & 0o777:04o}"
        raise ConfigError(message, hint=f"chmod o= {path.name}, and create a new secret if the machine has other users")
    if not text:
        message = f"the secret file is empty: {path}"
        raise ConfigError(message, hint="python3 -m appliance.host.provision secrets FOLDER creates missing secrets")
    rule = RULES.get(path.name)
    if rule and not re.fullmatch(rule.form, text):
        message = f"the secret has the wrong form: {path}: {len(text)} characters, required: {rule.words}"
        raise ConfigError(
            message, hint="remove it; python3 -m appliance.host.provision secrets FOLDER creates a new one"
        )
    return text


def check_folder(folder: Path) -> tuple[str, ...]:
    """Return the names of the secrets in the folder after checking them all. Raises ConfigError."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name in RULES)
    except OSError as error:
        message = f"the folder of secrets cannot be read: {folder}: {_why(error)}"
        raise ConfigError(message, hint="python3 -m appliance.host.provision secrets FOLDER creates one") from error
    if not paths:
        message = f"the folder contains no secret: {folder}: known names are {', '.join(RULES)}"
        raise ConfigError(message, hint="python3 -m appliance.host.provision secrets FOLDER creates them")
    for path in paths:
        read_secret(path)
    return tuple(path.name for path in paths)


def make_secrets(folder: Path) -> dict[str, str]:
    """Create the missing secrets and return each name with "made" or "kept". Existing secrets are checked and never
    replaced. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return {name: _make(folder / name, rule) for name, rule in RULES.items()}
    except OSError as error:
        message = f"the secrets cannot be written: {folder}: {_why(error)}"
        raise ConfigError(
            message, hint="name a folder that you may write to: python3 -m appliance.host.provision secrets FOLDER"
        ) from error


def _make(path: Path, rule: Rule) -> str:
    if path.exists():
        read_secret(path)
        return "kept"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(f"{rule.make()}\n")
    return "made"


def write_key(path: Path, key: str) -> bool:
    """Write the key to the file. False if the file already holds it. Raises ConfigError."""
    line = f"{key}\n"
    try:
        if path.exists() and path.read_text(encoding="utf-8") == line:
            return False
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        with os.fdopen(handle, "w") as file:
            file.write(line)
        temporary.replace(path)
    except (OSError, UnicodeError) as error:
        message = f"the token's file cannot be written: {path}: {_why(error)}"
        raise ConfigError(message, hint="--token-file takes a file on a volume that this user may write") from error
    return True


def _why(error: OSError | UnicodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
