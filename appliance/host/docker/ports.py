"""The port of this machine at which a container is published."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from appliance.errors import ConfigError, UsageError

PORT = 11435  # the appliance's port in its container, and the first choice on this machine


def choose(bind: str, asked: int | None, taken: Mapping[int, str]) -> int:
    """Return `asked`, or the first free port. `taken` maps ports that Docker publishes to their containers. Raises
    UsageError for a number that is no port, ConfigError for one in use."""
    if asked is None:
        return next(port for port in range(PORT, 65536) if port not in taken and is_free(bind, port))
    if not 1 <= asked <= 65535:
        message = f"--port is outside 1 to 65535: {asked}"
        raise UsageError(message, hint="omit --port to use the first free one")
    if asked in taken or not is_free(bind, asked):
        raise in_use(bind, asked, taken.get(asked))
    return asked


def is_free(bind: str, port: int) -> bool:
    """True if the port can be bound. Raises ConfigError for an address that this machine does not have."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except PermissionError:
            return True  # below 1024: we may not try, but the daemon may bind it
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            message = f"--bind is not an address of this machine: {bind}: {error.strerror}"
            raise ConfigError(message, hint="127.0.0.1, 0.0.0.0, or an address that `ip address` shows") from error
    return True


def in_use(bind: str, port: int, by: str | None = None) -> ConfigError:
    message = f"the port is in use: {bind}:{port}{f', by {by}' if by else ''}"
    return ConfigError(message, hint="choose another one with --port N, or omit --port to use the first free one")
