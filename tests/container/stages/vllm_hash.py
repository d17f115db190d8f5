"""What vLLM's own key of its compile cache depends on: run with vLLM's own Python, mounted into its image.

In: a JSON object of named changes to `BASE`, each an object of engine arguments. Out, on the last line: for each name
the hash of the configuration, the key of the compile cache and, with the card's name, that of the kept profile
(`startup_plan.py`). The model is the folder /model.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

BASE: dict[str, Any] = {
    "model": "/model",
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2048,
    "generation_config": "vllm",
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
}


def main() -> None:
    context = import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs
    changes: dict[str, dict[str, Any]] = json.load(sys.stdin)
    made = {
        name: arguments(**{**BASE, **change}).create_engine_config(usage_context=context)
        for name, change in changes.items()
    }
    print(json.dumps({name: config.compute_hash() for name, config in made.items()}))


if __name__ == "__main__":
    main()
