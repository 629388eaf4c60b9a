"""`octavo chat`: a conversation with a running server. The command keeps the history and sends it with each message."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from octavo_server.cli.chat_flags import sampling_of
from octavo_server.cli.chat_session import Command, print_ending, run_session
from octavo_server.cli.terminal_client import StreamedAnswer, TerminalClient, print_hint

Message = dict[str, str]


def chat(args: argparse.Namespace) -> int:
    return run_session(args, lambda client: InteractiveChat(client, args))


class InteractiveChat:
    """Session of `octavo chat`: applies the user's messages and /commands to a conversation."""

    def __init__(self, client: TerminalClient, args: argparse.Namespace) -> None:
        self._client = client
        self._sampling = sampling_of(args)
        self._shows_stats = bool(args.stats)
        self._answers: list[StreamedAnswer] = []
        self.conversation = Conversation(args.system)
        self.welcome = "Type a message; /help lists the commands, Ctrl-C stops an answer, Ctrl-D exits."
        self.commands = (
            Command("clear", "", "delete the conversation, except the system prompt", self._clear),
            Command("system", "[TEXT]", 'set the system prompt, or remove it ("" as TEXT), then show it', self._system),
            Command("retry", "", "generate another answer to the last message", self._retry),
            Command("save", "FILE", "write the conversation to a file, as JSON", self._save),
            Command("load", "FILE", "continue the conversation that a file contains", self._load),
            Command("stats", "", "show tokens and times of the last answer and of all answers", self._stats),
        )

    def submit(self, text: str) -> StreamedAnswer:
        self.conversation.ask(text)
        return self._continue()

    def _continue(self) -> StreamedAnswer:
        body = {"messages": self.conversation.messages, **self._sampling}
        answer = self._client.stream_answer("/chat/completions", body)
        self.conversation.answer(answer.text)
        self._answers.append(answer)
        print_ending(answer, shows_stats=self._shows_stats)
        return answer

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        print_hint("The conversation was deleted.")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == '""' else text
        print_hint(f"System prompt: {self.conversation.system or '(none)'}")

    def _retry(self, _: str) -> None:
        if self.conversation.remove_last_answer():
            self._continue()
        else:
            print_hint("There is no message to retry yet.")

    def _save(self, file: str) -> None:
        def save(path: Path) -> None:
            self.conversation.save(path)
            print_hint(f"{len(self.conversation.turns)} messages were saved to {path}.")

        _with_file(file, save)

    def _load(self, file: str) -> None:
        def load(path: Path) -> None:
            self.conversation = Conversation.load(path)
            print_hint(f"{len(self.conversation.turns)} messages were loaded from {path}.")

        _with_file(file, load)

    def _stats(self, _: str) -> None:
        if not self._answers:
            print_hint("There is no answer yet.")
            return
        total = sum(a.usage.completion_tokens or 0 for a in self._answers if a.usage)
        print_hint(f"last answer: {self._answers[-1].stats()}")
        print_hint(
            f"all {len(self._answers)} answers: {total} tokens in {sum(a.duration_s for a in self._answers):.1f} s"
        )


def _with_file(file: str, use: Callable[[Path], None]) -> None:
    if not file:
        print_hint("This command needs the name of a file.")
        return
    try:
        use(Path(file).expanduser())
    except NotAConversation as error:
        print_hint(str(error))
    except OSError as error:
        print_hint(f"{file}: {error.strerror}")


class NotAConversation(ValueError):
    pass


@dataclass(slots=True)
class Conversation:
    """The messages of a chat. Only the last one can be a question without an answer: `/retry` sends it again, a new
    question replaces it."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    @property
    def awaits_answer(self) -> bool:
        return bool(self.turns) and self.turns[-1]["role"] == "user"

    def ask(self, text: str) -> None:
        if self.awaits_answer:
            self.turns.pop()
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add an answer, also one that was stopped early; an empty answer is not added."""
        if text:
            self.turns.append({"role": "assistant", "content": text})

    def remove_last_answer(self) -> bool:
        """Remove the last message if it is an answer; return whether the last message is now a question."""
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        return self.awaits_answer

    def clear(self) -> None:
        self.turns.clear()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """Load a file written by `save`, or a JSON list of messages. Raises OSError, NotAConversation."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise NotAConversation(f"{path} is not JSON: {error}") from error
        messages = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise NotAConversation(f'{path} does not contain a list of {{"role": ..., "content": ...}} messages.')
        system = "\n".join(m["content"] for m in messages if m["role"] == "system")
        return cls(system, [m for m in messages if m["role"] != "system"])


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
