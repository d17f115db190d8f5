"""Tokens and times of requests in /metrics, under our names and those of well-known servers."""

from __future__ import annotations

from tests.process.stages.gateway import KEY, eventually, on_stage, read_until


def test_a_stream_is_counted_when_it_ends() -> None:
    with on_stage("fake_engine.py", "--chunks", "5", slots=2) as stage:

        def counted(name: str) -> float | None:
            lines = stage.ask("GET", "/metrics").body.decode().splitlines()
            values = [line for line in lines if line.startswith(f'{name}{{model_name="small"}} ')]
            return float(values[0].split()[-1]) if values else None

        assert counted("appliance_generated_tokens_total") is None
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with stage.post("/v1/chat/completions", body) as chat:
            read_until(chat, b"[DONE]")
        eventually(lambda: counted("appliance_generated_tokens_total") == 5.0)
        for name in ("vllm:generation_tokens_total", "llamacpp:tokens_predicted_total"):
            assert counted(name) == 5.0
        assert counted("vllm:time_to_first_token_seconds_count") == 1.0
        assert KEY not in stage.ask("GET", "/metrics").body.decode()
