"""vLLM's spellings of flags: underscores, and entries of JSON objects."""

import json

import pytest
from octavo_server.cli.config_file import normalise_flags
from octavo_server.cli.main import build_parser
from octavo_server.cli.serve import engine_config_of, server_config_of

KNOWN = {"--max-model-len", "--config-json", "--stop", "-c"}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["m", "--max_model_len", "9"], ["m", "--max-model-len", "9"]),
        (["--max_model_len=a_b"], ["--max-model-len=a_b"]),
        (["--un_known", "a_b.c"], ["--un_known", "a_b.c"]),
        (["--un.known", "1"], ["--un.known", "1"]),
        (["--stop", "--", "--max_model_len"], ["--stop", "--", "--max_model_len"]),
    ],
)
def test_underscores_become_dashes_in_known_flags(given, found):
    assert normalise_flags(given, KNOWN) == found


@pytest.mark.parametrize(
    ("given", "entries"),
    [
        (["--config_json.a", "x", "--config-json.b_c=2"], {"a": "x", "b_c": 2}),
        (["--config-json.a.b", "-1.5"], {"a": {"b": -1.5}}),
        (["--config-json.a", "--config-json.b", "False"], {"a": True, "b": False}),
        (["--config-json.a+", "x", "--config-json.a+=y,3"], {"a": ["x", "y", 3]}),
        (['--config-json.a={"b": [1]}'], {"a": {"b": [1]}}),
    ],
)
def test_entries_become_one_object(given, entries):
    (found,) = normalise_flags(given, KNOWN)
    assert found.startswith("--config-json=")
    assert json.loads(found.partition("=")[2]) == entries


def test_entries_of_a_short_flag():
    assert normalise_flags(["-c.mode=3", "m"], KNOWN) == ["m", '-c={"mode": 3}']


def test_object_is_not_given_twice(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--kv-events-config", "{}", "--kv-events-config.topic", "t"])
    assert "--kv-events-config is given both as a whole and by entries" in capsys.readouterr().err


def parse(*argv):
    args = build_parser().parse_args(["serve", *argv])
    engine = engine_config_of(args)
    return engine, server_config_of(args, engine)


def test_spellings_set_the_fields():
    engine, server = parse(
        *("m", "--max_model_len", "4096", "--override_generation_config.top_p", "0.5", "--shutdown_timeout", "7"),
        *("--default-chat-template-kwargs.enable_thinking", "false", "--download_dir", "/models", "-O3", "-tp=1"),
    )
    assert (engine.max_model_len, engine.override_generation_config) == (4096, {"top_p": 0.5})
    assert (engine.download_dir, server.drain_timeout) == ("/models", 7.0)
    assert server.default_chat_template_kwargs == {"enable_thinking": False}


def test_entries_of_an_engines_object_are_read():
    engine, _ = parse("--kv-events-config.enable_kv_cache_events", "true", "--kv-events-config.topic", "t")
    assert engine.kv_events_config is not None
    assert engine.kv_events_config.topic == "t"
