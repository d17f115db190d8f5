"""A GGUF file as a folder that vLLM serves: bf16 safetensors, config and tokenizer. Run with vLLM's own Python.

    /opt/vllm/bin/python gguf_to_safetensors.py MODEL.gguf FOLDER READERS

transformers reads GGUF itself, with the packages gguf and accelerate, which are in READERS. The weights are those of
the quantized file, made whole again: nothing is won by it but a model that an engine without GGUF can load.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main(gguf: Path, folder: Path) -> None:
    transformers, torch = import_module("transformers"), import_module("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The tensors are whole, and transformers would still take the model for a GGUF file, which it does not write.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # weights are written for their owner alone, and a container runs as somebody else


if __name__ == "__main__":
    sys.path.append(sys.argv[3])
    main(Path(sys.argv[1]), Path(sys.argv[2]))
