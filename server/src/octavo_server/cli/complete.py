"""`octavo complete`: the model goes on with a text; each prompt stands alone."""

import argparse

from octavo_server.cli.answers import Answer, Answerer, hint
from octavo_server.cli.chat_flags import sampling_of
from octavo_server.cli.converse import converse, tell_ending
from octavo_server.cli.shell import Command


def complete(args: argparse.Namespace) -> int:
    return converse(args, lambda answerer: CompletionTurns(answerer, args))


class CompletionTurns:
    def __init__(self, answerer: Answerer, args: argparse.Namespace) -> None:
        self._answerer = answerer
        self._sampling = sampling_of(args)
        self._shows_stats = bool(args.stats)
        self._latest: tuple[str, Answer] | None = None
        self.welcome = "Type the start of a text; /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."
        self.commands = (
            Command("retry", "", "another answer to the last text", self._retry),
            Command("stats", "", "tokens and times of the last answer", self._stats),
        )

    def take(self, text: str) -> Answer:
        answer = self._answerer.answer("/completions", {"prompt": text, **self._sampling})
        self._latest = text, answer
        tell_ending(answer, shows_stats=self._shows_stats)
        return answer

    def _retry(self, _: str) -> None:
        if self._latest is None:
            hint("Nothing was asked yet.")
        else:
            self.take(self._latest[0])

    def _stats(self, _: str) -> None:
        hint("No answer yet." if self._latest is None else self._latest[1].stats())
