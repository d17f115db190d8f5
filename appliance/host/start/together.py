"""Reports several errors of a start together, so that a user does not meet the next one after repairing the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from appliance.errors import FatalError


class SeveralErrors(FatalError):  # noqa: N818 - the name says what it is
    """Several errors in the order in which they were found; the exit code is the first one's."""

    def __init__(self, errors: Sequence[FatalError]) -> None:
        super().__init__("; ".join(each.message for each in errors))
        self.errors = tuple(errors)
        self.exit_code = errors[0].exit_code


def refuse_together(*looks: Callable[[], object]) -> None:
    """Call every check. Raises the error if one check failed, and SeveralErrors if more did."""
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
