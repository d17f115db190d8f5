"""Where a container is published on this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from appliance.errors import ConfigError, UsageError

PORT = 11435  # of the appliance in its container; published, the first that is asked for


def choose(bind: str, asked: int | None, taken: Mapping[int, str]) -> int:
    """`asked`, or the first free one; `taken` are Docker's own, by who has them. ConfigError for one in use."""
    if asked is None:
        return next(port for port in range(PORT, 65536) if port not in taken and is_free(bind, port))
    if not 1 <= asked <= 65535:
        message = f"--port is outside 1 to 65535: {asked}"
        raise UsageError(message, hint="without --port the first free one is taken")
    if asked in taken or not is_free(bind, asked):
        raise in_use(bind, asked, taken.get(asked))
    return asked


def is_free(bind: str, port: int) -> bool:
    """ConfigError for an address that this machine does not have."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except PermissionError:
            return True  # below 1024: not ours to try, and the daemon may
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            message = f"--bind is no address of this machine: {bind}: {error.strerror}"
            raise ConfigError(message, hint="127.0.0.1, 0.0.0.0, or an address that `ip address` shows") from error
    return True


def in_use(bind: str, port: int, by: str | None = None) -> ConfigError:
    message = f"the port is in use: {bind}:{port}{f', by {by}' if by else ''}"
    return ConfigError(message, hint="another one: --port N; without --port the first free one is taken")
