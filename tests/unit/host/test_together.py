"""Several things that would stop a start, told together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.errors import ConfigError, FatalError, VolumeError
from appliance.host.start.together import SeveralErrors, refuse_together


def failing(error: FatalError) -> Callable[[], object]:
    def look() -> object:
        raise error

    return look


FULL, WRONG = VolumeError("the volume is full"), ConfigError("a name is wrong")


def test_all_are_told_in_their_order_and_the_first_gives_the_code() -> None:
    looked: list[int] = []
    with pytest.raises(SeveralErrors) as caught:
        refuse_together(failing(FULL), lambda: looked.append(1), failing(WRONG), lambda: looked.append(2))
    assert caught.value.errors == (FULL, WRONG)
    assert caught.value.exit_code == FULL.exit_code != WRONG.exit_code
    assert caught.value.message == "the volume is full; a name is wrong"
    assert looked == [1, 2]


def test_the_only_one_is_itself_and_none_is_none() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_together(lambda: None, failing(WRONG))
    assert caught.value is WRONG
    assert refuse_together(lambda: None, lambda: None) is None  # type: ignore[func-returns-value]
