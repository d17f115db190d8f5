from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.mcp import refuse_mcp
from appliance.gateway.wire.reasoning import with_template_words

ON, OFF = ({"enable_thinking": is_on, "thinking": is_on} for is_on in (True, False))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, ON),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, {**ON, "reasoning_effort": "max"}),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"output_config": {"effort": "low", "format": {}}}, {"reasoning_effort": "low"}),
    ],
)
def test_words_are_added_and_no_other_byte_changes(asked: dict[str, Any], words: dict[str, Any]) -> None:
    for body in (json.dumps(asked), json.dumps(asked, indent=1), f"\ufeff {json.dumps(asked)}"):
        found = with_template_words(body.encode()).decode()
        assert json.loads(found.removeprefix("\ufeff")) == {**asked, "chat_template_kwargs": words}
        assert found.replace(f'"chat_template_kwargs":{json.dumps(words)},', "") == body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"thinking"',
        b'"thinking"',
        b'{"thinking": null}',
        b'{"thinking": {"type": ["enabled"]}}',
        b'{"thinking": {"type": "sometimes"}, "output_config": {"effort": 1}}',
        b'{"thinking": {"type": "enabled"}, "chat_template_kwargs": {}}',
        b'{"messages": [{"content": [{"type": "thinking", "thinking": "disabled"}]}]}',
    ],
)
def test_every_other_body_stays(body: bytes) -> None:
    assert with_template_words(body) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"mcp_servers": [{"url": "a"}]}',
        b'{"tools": [{"type": "function"}, {"type": "mcp"}]}',
        b'\xef\xbb\xbf{"tools": [{"type": "mcp_toolset"}]}',
    ],
)
def test_mcp_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        refuse_mcp(body)
    assert (caught.value.status, caught.value.code) == (400, "mcp_not_offered")


@pytest.mark.parametrize(
    "body",
    [
        b'{"mcp_servers": []}',
        b'{"mcp_servers": null}',
        b'{"tools": [{"type": 1}, "mcp"]}',
        b'{"tools": "mcp"}',
        b'"mcp',
    ],
)
def test_what_asks_for_no_mcp_passes(body: bytes) -> None:
    refuse_mcp(body)
