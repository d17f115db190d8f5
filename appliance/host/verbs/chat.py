"""`appliance chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from appliance.console.shown import beneath, shown
from appliance.errors import EngineDiedError, FatalError
from appliance.host.docker import containers
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import Gateway, NoAnswerError
from appliance.settings import process_environment

PROMPT = ">>> "
HELP = "/exit ends the chat, /clear starts a new conversation; Ctrl-C stops an answer, Ctrl-D ends the chat"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
Message = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    containers.add_name(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="most tokens of one answer")
    parser.add_argument("--temperature", metavar="T", type=float, help="sampling temperature")


def run(options: argparse.Namespace) -> int:
    with connected(process_environment()) as client:
        found = containers.choose(containers.all_of_ours(client), containers.name_in(options))
        gateway = containers.gateway(client, found)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{found.model.rsplit('/', 1)[-1] or found.short_name}: {HELP}", file=sys.stderr)
        if importlib.util.find_spec("readline"):
            __import__("readline")  # line editing and history for input()
    system = [{"role": "system", "content": options.system}] if options.system else []
    knobs = {name: value for name in ("max_tokens", "temperature") if (value := getattr(options, name)) is not None}
    Conversation(gateway, system, knobs).hold(_questions(is_terminal))
    return 0


def _questions(is_terminal: bool) -> Iterator[str]:
    while True:
        try:
            line = input(PROMPT if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            print()
            if not is_terminal:
                return
            continue
        if line.strip():
            yield line.strip()


class Conversation:
    def __init__(self, gateway: Gateway, system: list[Message], knobs: dict[str, Any]) -> None:
        self._gateway = gateway
        self._system = system
        self._knobs = knobs
        self._messages = list(system)

    def hold(self, questions: Iterator[str]) -> None:
        for question in questions:
            if question in ("/exit", "/quit", "/bye"):
                return
            if question == "/clear":
                self._messages = list(self._system)
                print("conversation cleared", file=sys.stderr)
            elif question.startswith("/"):
                print(HELP, file=sys.stderr)
            else:
                self._ask(question)

    def _ask(self, question: str) -> None:
        """Ask and print the answer. If the answer fails, neither it nor the question is kept, so that it can be asked
        again."""
        asked = [*self._messages, {"role": "user", "content": question}]
        words: list[str] = []
        try:
            for piece in self._pieces(asked):
                words.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" (ended)", end="")
        except FatalError as error:
            print()
            if not sys.stdin.isatty():
                raise
            print(f"error: {error.message}{f'; {error.hint}' if error.hint else ''}", file=sys.stderr)
            return
        print()
        self._messages = [*asked, {"role": "assistant", "content": "".join(words)}]

    def _pieces(self, messages: list[Message]) -> Iterator[str]:
        """Yield pieces of the answer. Reasoning is shown, but not yielded or kept."""
        body = {"model": "any", "messages": messages, "stream": True, **self._knobs}
        thinks = False
        for delta in self._deltas(body):
            if thought := delta.get("reasoning_content"):
                thinks = True
                _show_thought(thought)
            if text := delta.get("content"):
                if thinks:
                    thinks = False
                    _show_thought("\n\n")
                yield text

    def _deltas(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._gateway.stream("/v1/chat/completions", body) as events:
                for event in events:
                    yield from (choice.get("delta") or {} for choice in event.get("choices") or ())
        except NoAnswerError as error:
            message = f"the answer broke off: {error}"
            raise EngineDiedError(message, hint="`appliance status` shows whether it still serves") from error


def _show_thought(words: str) -> None:
    styled = f"{DIM}{shown(words)}{PLAIN}" if sys.stderr.isatty() else shown(words)
    print(styled, end="", file=beneath(sys.stderr), flush=True)
