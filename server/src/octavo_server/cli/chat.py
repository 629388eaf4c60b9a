"""`octavo chat`: a conversation with a running server, of many turns; its history is kept here and sent each time."""

import argparse
from collections.abc import Callable
from pathlib import Path

from octavo_server.cli.answers import Answer, Answerer, hint
from octavo_server.cli.chat_flags import sampling_of
from octavo_server.cli.conversation import Conversation, NotAConversation
from octavo_server.cli.converse import converse, tell_ending
from octavo_server.cli.shell import Command


def chat(args: argparse.Namespace) -> int:
    return converse(args, lambda answerer: ChatTurns(answerer, args))


class ChatTurns:
    """What a text or a command does to the conversation."""

    def __init__(self, answerer: Answerer, args: argparse.Namespace) -> None:
        self._answerer = answerer
        self._sampling = sampling_of(args)
        self._shows_stats = bool(args.stats)
        self._answers: list[Answer] = []
        self.conversation = Conversation(args.system)
        self.welcome = "Type a message; /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."
        self.commands = (
            Command("clear", "", "forget the conversation, keep the system prompt", self._clear),
            Command("system", "[TEXT]", 'set the system prompt; "" takes it away, nothing shows it', self._system),
            Command("retry", "", "another answer to the last question", self._retry),
            Command("save", "FILE", "write the conversation as JSON", self._save),
            Command("load", "FILE", "go on with a conversation from a file", self._load),
            Command("stats", "", "tokens and times of the last answer, and of all", self._stats),
        )

    def take(self, text: str) -> Answer:
        self.conversation.ask(text)
        return self._continue()

    def _continue(self) -> Answer:
        body = {"messages": self.conversation.messages, **self._sampling}
        answer = self._answerer.answer("/chat/completions", body)
        self.conversation.answer(answer.text)
        self._answers.append(answer)
        tell_ending(answer, shows_stats=self._shows_stats)
        return answer

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        hint("The conversation starts anew.")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == '""' else text
        hint(f"System prompt: {self.conversation.system or '(none)'}")

    def _retry(self, _: str) -> None:
        if self.conversation.take_back_answer():
            self._continue()
        else:
            hint("Nothing was asked yet.")

    def _save(self, file: str) -> None:
        def save(path: Path) -> None:
            self.conversation.save(path)
            hint(f"{len(self.conversation.turns)} messages are in {path}.")

        _with_file(file, save)

    def _load(self, file: str) -> None:
        def load(path: Path) -> None:
            self.conversation = Conversation.load(path)
            hint(f"{len(self.conversation.turns)} messages from {path}.")

        _with_file(file, load)

    def _stats(self, _: str) -> None:
        if not self._answers:
            hint("No answer yet.")
            return
        total = sum(a.usage.completion_tokens or 0 for a in self._answers if a.usage)
        hint(f"last answer: {self._answers[-1].stats()}")
        hint(f"all {len(self._answers)} answers: {total} tokens in {sum(a.duration_s for a in self._answers):.1f} s")


def _with_file(file: str, use: Callable[[Path], None]) -> None:
    if not file:
        hint("Name a file.")
        return
    try:
        use(Path(file).expanduser())
    except NotAConversation as error:
        hint(str(error))
    except OSError as error:
        hint(f"{file}: {error.strerror}")
