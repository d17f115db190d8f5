"""Prompts that llama-server keeps on disk (images/patches/llama-prompt-disk.patch): its arguments, and the key that
says which states fit a start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from appliance.command import Command
from appliance.engines.engine import PromptFolder
from appliance.image_facts import EngineFacts

FLAG = "--cache-disk"
STOP_MS = 1200  # for saving at a stop: less than `Command.stop_grace_s`, after which the engine is killed
VARIABLE = "LLAMA_CACHE_DISK_SECRET"  # in the environment: an argument would show the secret to every process
# Arguments that change nothing in a state, each with the reason. All others are part of the key, also unknown ones.
_PLACE = "where and how fast a state is computed, not what it holds"
_SIZE = "a state has the cells of its own tokens only, and the engine itself refuses one that does not fit"
_OUTSIDE = "before the tokens or after them"
WITHOUT_EFFECT: Mapping[str, str] = {
    "--model": "the model's digest is in the key",
    "--alias": _OUTSIDE,
    "--host": _OUTSIDE,
    "--port": _OUTSIDE,
    "--fit": _PLACE,
    "--ctx-size": _SIZE,
    "--parallel": _SIZE,
    "--cache-ram": _SIZE,
    "--slot-prompt-similarity": _SIZE,
    "--no-cache-idle-slots": _SIZE,
    "--ctx-checkpoints": "each file has the checkpoints that there were",
    "--threads": _PLACE,
    "--threads-batch": _PLACE,
    "--batch-size": _PLACE,
    "--ubatch-size": _PLACE,
    "--numa": _PLACE,
    "--cpu-mask": _PLACE,
    "--cpu-mask-batch": _PLACE,
    "--load-mode": _PLACE,
    "--device": _PLACE,
    "--gpu-layers": _PLACE,
    "--tensor-split": _PLACE,
    "--main-gpu": _PLACE,
    "--n-cpu-moe": _PLACE,
    "--moe-slots": _PLACE,
    "--moe-rates": _PLACE,
    "--moe-uses": _PLACE,
    "--moe-trace": _OUTSIDE,
    "--no-mmproj-offload": _PLACE,
    "--device-draft": _PLACE,
    "--gpu-layers-draft": _PLACE,
    "--spec-draft-n-max": "how many tokens are proposed, not what is kept of them",
    "--spec-ngram-mod-n-max": "how many tokens are proposed, not what is kept of them",
    "--spec-ngram-mod-n-min": "how many tokens are proposed, not what is kept of them",
    "--chat-template-file": _OUTSIDE,
    "--reasoning-format": _OUTSIDE,
    "--offline": _OUTSIDE,
    "--no-ui": _OUTSIDE,
    "--metrics": _OUTSIDE,
    "--log-prefix": _OUTSIDE,
    "--log-colors": _OUTSIDE,
    "--log-verbosity": _OUTSIDE,
}


def keep_prompts(command: Command, facts: EngineFacts, folder: PromptFolder) -> Command:
    """Return the command with the folder; unchanged if this build of the engine has no such option."""
    if FLAG not in facts.flags:
        return command
    found = (
        FLAG, str(folder.path),
        "--cache-disk-mib", str(folder.limit_mib),
        "--cache-disk-key", key_of(command.argv, facts, folder),
        "--cache-disk-stop-ms", str(STOP_MS),
        *(("--metrics",) if "--metrics" in facts.flags else ()),  # they have the counts of saved prompts
    )  # fmt: skip
    return replace(command, argv=(*command.argv, *found), environment={**command.environment, VARIABLE: folder.secret})


def key_of(argv: Sequence[str], facts: EngineFacts, folder: PromptFolder) -> str:
    """Return the key of states: the model's digest, a hyphen, and a hash over all else that a state depends on.

    `argv` begins with the program. The order of its options does not matter, but for two of one name.
    """
    options = sorted(
        (option for option in _options(argv[1:]) if option[0] not in WITHOUT_EFFECT), key=lambda option: option[0]
    )
    text = json.dumps([facts.build, facts.commit, folder.attached, options])
    return f"{folder.model}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each option with its values."""
    option: list[str] = []
    for argument in arguments:
        if argument.startswith("-") and not argument.removeprefix("-")[:1].isdigit():
            if option:
                yield tuple(option)
            option = []
        option.append(argument)
    if option:
        yield tuple(option)
