"""Start commands from vLLM's documentation, in `vllm_commands.yaml`: each starts, or its error names what is missing.

A command that starts is run up to the loading of the weights, with a small model in place of its own.
"""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from octavo_engine.frontend.request_builder import Frontend
from octavo_server.cli.main import build_parser, main
from octavo_server.cli.serve import engine_config_of, server_config_of
from octavo_server.cli.server_checks import check_keys
from octavo_server.cli.vllm_flags import unused_flags
from octavo_testing.scripted import write_byte_model

COMMANDS = yaml.safe_load((Path(__file__).parent / "vllm_commands.yaml").read_text())
CONTEXT = 131072


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


def with_model(argv, model):
    """The arguments with another model, which has no weights."""
    name = f"--model={model}" if argv[0].startswith("--model=") else str(model)
    return [name, *argv[1:], "--load-format", "dummy"]


def arguments(command):
    program, subcommand, *argv = shlex.split(command)
    assert (program, subcommand) == ("vllm", "serve")
    return argv


def test_there_are_forty():
    assert len({entry["command"] for entry in COMMANDS}) == len(COMMANDS) >= 40


@pytest.mark.parametrize("entry", [e for e in COMMANDS if "missing" not in e], ids=lambda e: e["command"][:70])
def test_command_starts(entry, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = build_parser().parse_args(["serve", *with_model(arguments(entry["command"]), model)])
    if args.chat_template is not None:
        template = tmp_path / args.chat_template
        template.parent.mkdir()
        template.write_text("{{ messages[0].content }}")
    config = engine_config_of(args)
    check_keys(server_config_of(args, config))
    assert Frontend.load(config).model.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("entry", [e for e in COMMANDS if "missing" in e], ids=lambda e: e["command"][:70])
def test_error_names_what_is_missing(entry, model, capsys):
    argv = arguments(entry["command"])
    argv = with_model(argv, model) if entry.get("of_checkpoint") else argv
    try:
        code = main(["serve", *argv])
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    assert entry["missing"] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("entry", [e for e in COMMANDS if "missing" not in e], ids=lambda e: e["command"][:70])
def test_flags_without_effect_are_named(entry):
    lines = unused_flags(build_parser().parse_args(["serve", *arguments(entry["command"])]))
    assert len(lines) == bool(entry.get("unused"))
    assert all(flag in lines[0] for flag in entry.get("unused", ()))
