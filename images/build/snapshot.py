"""Debian's snapshot service: past states of its archives by timestamp, and whether it answers now."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta

import requests

from images.build.mirror import Mirror
from images.matrix.matrix import Base
from images.pins import debian

TIMEOUT_S = 3.0
SIGNED = b"-----BEGIN PGP SIGNED MESSAGE-----"  # how an InRelease begins, and no page of a captive portal
# A state shows up when its import is whole, under the time at which that began: what is six hours old does not change.
SETTLED = timedelta(hours=6)


def settled(now: datetime) -> str:
    """Returns the youngest timestamp whose state no longer changes."""
    return (now - SETTLED).strftime(debian.TIMESTAMP)


def address(mirror: Mirror, base: Base) -> str:
    """Returns the address of the first file that apt would ask for."""
    return f"{mirror.root}/debian/{mirror.timestamp}/dists/{base.suite}/InRelease"


def query(url: str, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Returns why the service cannot be used, or None if it can. Never takes longer than the timeout.

    A timeout of `requests` limits connecting and the gap between two bytes; resolving a name has none. So the question
    is left in its thread when the time is up.
    """
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(_refusal(url, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    refusal = said[0] if said else _late(timeout_s)
    return f"{url}: {refusal}" if refusal else None


def _refusal(url: str, timeout_s: float) -> str | None:
    try:
        with requests.get(url, stream=True, timeout=timeout_s) as answer:  # follows the service's redirects
            if answer.status_code != requests.codes.ok:
                return f"it answers {answer.status_code}"
            begin = next(answer.iter_content(len(SIGNED)), b"")
            return None if begin == SIGNED else "it answers with something else than a signed list"
    except requests.exceptions.Timeout:
        return _late(timeout_s)
    except requests.exceptions.ConnectionError as error:
        return "its name is not known here" if "resolve" in str(error) else "no connection"
    except requests.exceptions.RequestException as error:
        return " ".join(str(error).split())


def _late(timeout_s: float) -> str:
    return f"no answer within {timeout_s:g} s"
