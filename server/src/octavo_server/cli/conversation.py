"""`Conversation`: the messages of a chat, which can be saved to a file and loaded.

Only the last message can be a question without an answer: `/retry` sends it again, a new question replaces it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

Message = dict[str, str]


class NotAConversation(ValueError):
    pass


@dataclass(slots=True)
class Conversation:
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
