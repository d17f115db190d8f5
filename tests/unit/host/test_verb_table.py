"""The one table of the host's verbs."""

from __future__ import annotations

import argparse
import importlib

import pytest

from appliance.host.verb_table import VERBS


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_is_a_module_with_arguments_and_an_end(name: str) -> None:
    verb = importlib.import_module(VERBS[name].module)
    parser = argparse.ArgumentParser(exit_on_error=False)
    verb.add_arguments(parser)
    assert parser.format_usage()
    assert callable(verb.run)
    assert VERBS[name].about
    assert VERBS[name].inside
