"""The whole command line: help, version, shell completion; and the conversation of `octavo chat`."""

import json
import shutil
import subprocess
import sys

import pytest
from octavo_server.cli.chat import Conversation, NotAConversation
from octavo_server.cli.chat_session import Command, Shell
from octavo_server.cli.main import COMMANDS, main


def exits(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_describes_each_command(capsys):
    text = " ".join(exits(["--help"], capsys).split())
    for name, spec in COMMANDS.items():
        assert f"{name} {spec.text.partition('. ')[0].removesuffix('.')}." in text


def test_version_is_printed(capsys):
    assert exits(["--version"], capsys).startswith("octavo 0.")


def test_help_imports_no_module_that_only_a_command_needs():
    code = (
        "import sys, octavo_server.cli.main as m\n"
        "try: m.main(['bench', 'serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'aiohttp', 'asyncio', 'matplotlib', 'shtab', 'tqdm', 'readline'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--request-rate" in done.stdout


@pytest.fixture(scope="module")
def bash_completes(tmp_path_factory):
    """Completions that bash offers for the last of the words."""
    folder = tmp_path_factory.mktemp("bash")
    (folder / "manifest.yaml").touch()
    (folder / "models").mkdir()

    def complete(*words):
        command = [sys.executable, "-m", "octavo_server.cli.main", "completion", "bash"]
        written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        typed = f"COMP_WORDS=(octavo {' '.join(words)})\nCOMP_CWORD={len(words)}\n"
        script = f'{written}{typed}_shtab_octavo\necho "${{COMPREPLY[@]}}"\n'
        bash = shutil.which("bash")
        assert bash
        done = subprocess.run([bash], input=script, capture_output=True, text=True, check=False, cwd=folder)
        return done.stdout.split()

    return complete


def test_bash_completes_commands_and_flags(bash_completes):
    assert bash_completes("bench", "serve", "--request-r") == ["--request-rate"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["fet"], ["fetch"]),
        (["fetch", "--load-format", "safe"], ["safetensors"]),
        (["fetch", "--to", "mo"], ["models"]),
        (["up", "-f", "mani"], ["manifest.yaml"]),
        (["up", "--file", "mani"], ["manifest.yaml"]),
        (["explain", "inf"], ["infsvc"]),
        (["explain", "infsvc", "--out"], ["--output"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_bash_completes_arguments_of_each_command(words, offered, bash_completes):
    assert [word.rstrip("/") for word in bash_completes(*words)] == offered


def test_zsh_script_is_printed(capsys):
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef octavo")
    assert "--kv-cache-memory-bytes" in script


def test_unanswered_question_is_replaced_by_the_next():
    conversation = Conversation("S")
    conversation.ask("one")
    conversation.answer("")
    conversation.ask("two")
    conversation.answer("2")
    assert [m["content"] for m in conversation.messages] == ["S", "two", "2"]
    assert conversation.remove_last_answer()
    assert conversation.awaits_answer
    conversation.clear()
    assert not conversation.remove_last_answer()
    assert conversation.messages == [{"role": "system", "content": "S"}]


def test_conversation_survives_saving_and_loading(tmp_path):
    conversation = Conversation("S", [{"role": "user", "content": "täg"}])
    conversation.save(tmp_path / "c.json")
    assert Conversation.load(tmp_path / "c.json") == conversation
    (tmp_path / "list.json").write_text(json.dumps(conversation.messages))
    assert Conversation.load(tmp_path / "list.json") == conversation


@pytest.mark.parametrize("content", ["nonsense", "{}", '[{"role": "user"}]', '[{"role": "user", "content": [1]}]'])
def test_invalid_conversation_file_is_rejected(content, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(NotAConversation, match=str(path)):
        Conversation.load(path)


class ScriptedEditor:
    def __init__(self, *events):
        self._events = iter(events)

    def read(self, prompt):
        event = next(self._events)
        if isinstance(event, str):
            return event
        raise event


@pytest.mark.parametrize(
    ("events", "texts"),
    [
        (["a", "", "  ", " /b", EOFError], ["a", " /b"]),
        (["a", KeyboardInterrupt, "b", KeyboardInterrupt, KeyboardInterrupt], ["a", "b"]),
        (["a", "/exit", "never"], ["a"]),
        (["/do it", "/do", "/undone", "/take x", EOFError], ["did it", "did "]),
    ],
    ids=["texts", "interrupts", "exit", "commands"],
)
def test_shell_runs_commands_and_passes_text_on(events, texts):
    taken, printed = [], []
    do = Command("do", "[WHAT]", "do it", lambda argument: taken.append(f"did {argument}"))
    take = Command("take", "", "take nothing", lambda argument: taken.append("took"))
    Shell(ScriptedEditor(*events), [do, take], taken.append, printed.append).run()
    assert taken == texts
