"""`appliance bench`: prefill, decode, TTFT and inter-token latency of any OpenAI endpoint. README.md defines the
terms."""

from appliance.host.bench.verb import DESCRIPTION, add_arguments, run

__all__ = ["DESCRIPTION", "add_arguments", "run"]
