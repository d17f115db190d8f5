"""Several things that would stop a start, told together: who mends one should not meet the next a minute later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from appliance.errors import FatalError


class SeveralErrors(FatalError):  # noqa: N818 - it is what it is called
    """Errors in the order in which they were met; the exit code is the first one's."""

    def __init__(self, errors: Sequence[FatalError]) -> None:
        super().__init__("; ".join(each.message for each in errors))
        self.errors = tuple(errors)
        self.exit_code = errors[0].exit_code


def refuse_together(*looks: Callable[[], object]) -> None:
    """Call every look. Raises the error of the only one that failed, and SeveralErrors if more did."""
    errors: list[FatalError] = []
    for look in looks:
        try:
            look()
        except FatalError as error:
            errors.append(error)
    if len(errors) > 1:
        raise SeveralErrors(errors)
    if errors:
        raise errors[0]
