"""`octavo complete`: the model continues each text that it gets, independently of earlier texts."""

import argparse

from octavo_server.cli.chat_flags import sampling_of
from octavo_server.cli.chat_session import Command, print_ending, run_session
from octavo_server.cli.terminal_client import StreamedAnswer, TerminalClient, print_hint


def complete(args: argparse.Namespace) -> int:
    return run_session(args, lambda client: InteractiveCompletion(client, args))


class InteractiveCompletion:
    def __init__(self, client: TerminalClient, args: argparse.Namespace) -> None:
        self._client = client
        self._sampling = sampling_of(args)
        self._shows_stats = bool(args.stats)
        self._latest: tuple[str, StreamedAnswer] | None = None
        self.welcome = "Type the start of a text; /help lists the commands, Ctrl-C stops an answer, Ctrl-D exits."
        self.commands = (
            Command("retry", "", "generate another answer to the last text", self._retry),
            Command("stats", "", "show tokens and times of the last answer", self._stats),
        )

    def submit(self, text: str) -> StreamedAnswer:
        answer = self._client.stream_answer("/completions", {"prompt": text, **self._sampling})
        self._latest = text, answer
        print_ending(answer, shows_stats=self._shows_stats)
        return answer

    def _retry(self, _: str) -> None:
        if self._latest is None:
            print_hint("There is no text to retry yet.")
        else:
            self.submit(self._latest[0])

    def _stats(self, _: str) -> None:
        print_hint("There is no answer yet." if self._latest is None else self._latest[1].stats())
