"""Short commands: given up as soon as nobody wants them."""

from __future__ import annotations

import threading
import time

import pytest

from appliance.run import RunTimeout, run


def test_what_nobody_wants_any_more_is_killed_at_once() -> None:
    given_up = threading.Event()
    threading.Timer(0.2, given_up.set).start()
    began = time.monotonic()
    with pytest.raises(RunTimeout):
        run(("sleep", "60"), timeout_s=60.0, is_wanted=lambda: not given_up.is_set())
    assert time.monotonic() - began < 30
