"""The termination message of a container: JSON with a code, within Kubernetes' limit."""

import json
from pathlib import Path

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.cli import termination_message as module
from octavo_server.cli.main import COMMANDS, build_parser, main
from octavo_server.cli.termination_message import MAX_BYTES, termination_message, write_termination_message


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setattr(module, "PATH", path)
    return path


def raise_startup_error(_: object) -> int:
    raise StartupError("no room\nfor it", code="OutOfMemory")


def test_a_start_error_is_printed_and_written_with_its_code(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_server.cli.fetch.fetch", raise_startup_error)
    assert main(["fetch", "hf://a/b"]) == 1
    assert json.loads(log.read_text()) == {"code": "OutOfMemory", "message": "no room\nfor it"}
    assert capsys.readouterr().err == "octavo: no room\noctavo: for it\n"


def test_no_file_is_created_outside_a_container(log: Path) -> None:
    log.unlink()
    write_termination_message(StartupError("x"))
    assert list(log.parent.iterdir()) == []


@pytest.mark.parametrize("character", ["x", "ü", "\n"], ids=["ASCII", "not ASCII", "escaped"])
def test_a_long_message_is_cut_to_the_limit_of_kubernetes(character: str) -> None:
    text = termination_message(StartupError(character * 10_000))
    assert len(text.encode()) <= MAX_BYTES
    assert json.loads(text)["message"].startswith(character * 100)


WRONG_FLAGS = [
    (["serve", "m", "--max-num-seqs", "0"], "argument --max-num-seqs: '0' must be at least 1"),
    (["serve", "m", "--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
    (["serve", "m", "--max-modle-len", "5"], "unrecognized arguments: --max-modle-len 5. Did you mean --max-model-len"),
    (["serve", "--config", "/nowhere.yaml"], "--config /nowhere.yaml: cannot be read"),
    (["serve", "m", "--max-num-seqs"], "argument --max-num-seqs: expected one argument"),
    (["route", "--workers", "none"], "argument --workers: 'none' is not a whole number"),
    (["fetch", "hf://a/b", "--load-format", "zip"], "argument --load-format: invalid choice: 'zip'"),
    (["fetch"], "the following arguments are required: MODEL"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG_FLAGS, ids=lambda value: " ".join(value))
def test_a_wrong_flag_leaves_its_message(argv: list[str], message: str, log: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    written = json.loads(log.read_text())
    assert written["code"] == "StartupFailed"
    assert written["message"].startswith(message)


def test_an_interrupted_command_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo_server.cli.replay.replay", interrupt)
    assert main(["replay", "trace"]) == 130


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"serve", "route", "fetch"}))
def test_a_command_that_a_user_runs_in_a_container_leaves_no_message(name: str, log: Path) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([name, "--no-such-flag", "--help-me"])
    assert log.read_text() == ""
