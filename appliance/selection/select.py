"""Select the model of a start: the one that is here, or what would have to be fetched first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING

from appliance.errors import ModelAwayError
from appliance.model import Model
from appliance.profile import Key
from appliance.selection.quantized import start_of
from appliance.selection.request import FromHub, FromRecipe, read_request
from appliance.settings import Settings
from appliance.start.attachments import with_attachments
from appliance.start.image import ImageContents, read_contents
from appliance.start.inputs import Located, StartInputs, read_located
from appliance.start.machine import UsableMachine, look_at_machine
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.selection.candidates import Chosen
    from appliance.selection.saved_choice import Saved

Look = Callable[[], UsableMachine]


@dataclass(frozen=True, kw_only=True)
class Selected:
    """A variant that is here, and how it was chosen."""

    located: Located
    request: FromRecipe
    made: Saved | Chosen


@dataclass(frozen=True, kw_only=True)
class Away:
    """A model that would have to be fetched; `words` name it."""

    request: FromRecipe | FromHub
    words: str


def select(
    contents: ImageContents, request: FromRecipe | FromHub, environment: Mapping[str, str], look: Look
) -> Selected | Away:
    """Select one of the candidates. Asks no network, and looks at the machine only if one of them is here.

    Raises an error of code 30, 31, 32 or 50 if none of them can be served.
    """
    if isinstance(request, FromHub) or not request.here:
        return Away(request=request, words=request.name)
    # here: a start whose model is named by its path never needs them
    from appliance.selection.candidates import choose_or_reuse
    from appliance.selection.saved_choice import Saved
    from appliance.weights.cache.size import in_column

    made = choose_or_reuse(contents, request, environment, look())
    if isinstance(made, Saved):
        return Selected(located=made.located, request=request, made=made)
    if located := made.pick.located:
        return Selected(located=located, request=request, made=made)
    candidate = made.pick.candidate
    return Away(request=request, words=f"{candidate.name}, {in_column(candidate.bytes)}")


def locate(contents: ImageContents, environment: Mapping[str, str], look: Look) -> Located:
    """Return the model if it is here. Raises ModelAwayError (10) if a start would fetch it first."""
    request = read_request(contents, environment)
    if isinstance(request, Located):
        return request
    found = select(contents, request, environment, look)
    if isinstance(found, Away):
        raise ModelAwayError(found.words)
    return found.located


def read_inputs(settings: Settings, environment: Mapping[str, str]) -> StartInputs:
    """Read image, model and machine. Writes nothing, starts nothing and fetches nothing.

    Raises what a start would be refused with, and ModelAwayError (10) for a model that would have to be fetched.
    """
    contents = read_contents(settings)
    look = cache(partial(look_at_machine, contents, environment))  # one look for this one start
    return start_of(contents, locate(contents, environment, look), look)


def load_model(contents: ImageContents, environment: Mapping[str, str]) -> Model:
    """Read the model that a start would serve. Raises ModelAwayError (10) if it is not here."""
    located = locate(contents, environment, partial(look_at_machine, contents, environment))
    return with_attachments(read_located(located, contents.engine), contents.settings)


def query_key(settings: Settings, environment: Mapping[str, str]) -> Key:
    """Return the key of the profile that a start here would want."""
    return read_inputs(settings, environment).key
