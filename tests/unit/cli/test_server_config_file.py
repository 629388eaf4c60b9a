"""`octavo serve --config FILE`: entries of the file count like typed flags, and the command line takes precedence."""

import pytest
from octavo_server.cli.main import build_parser
from octavo_server.cli.serve import engine_config_of, server_config_of
from octavo_testing.usage_errors import usage_error


@pytest.fixture
def parse(tmp_path):
    def parse(text, *argv, joined=False):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        config = [f"--config={path}"] if joined else ["--config", str(path)]
        return build_parser().parse_args(["serve", *argv, *config])

    return parse


EVERYTHING = """
model: /models/a
max-model-len: 32k
max_num_seqs: 7
gpu-memory-utilization: 0.5
enable-prefix-caching: false
enable_log_requests: true
enforce-eager: true
disable-log-stats: false
served-model-name: [a, b]
allowed-origins: ["https://x"]
max-logprobs: -1
tensor-parallel-size: 1
trust-remote-code: false
chat-template: null
"""


@pytest.mark.parametrize("joined", [False, True])
def test_every_type_of_value_is_read(parse, joined):
    args = parse(EVERYTHING, joined=joined)
    engine = engine_config_of(args)
    server = server_config_of(args, engine)
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("/models/a", 32_000, 7)
    assert (engine.gpu_memory_utilization, engine.enable_prefix_caching, engine.max_logprobs) == (0.5, False, -1)
    assert engine.enforce_eager is True
    assert (engine.served_model_name, engine.chat_template) == (("a", "b"), None)
    assert (server.enable_log_requests, server.disable_log_stats) == (True, False)
    assert server.cors.allowed_origins == ("https://x",)


def test_command_line_takes_precedence(parse):
    text = "model: /models/a\nport: 1\napi-key: [from, file]\nenable-prefix-caching: true\nmax_num_seqs: 3\n"
    argv = ("/models/b", "--port=2", "--api-key", "typed", "--no-enable-prefix-caching", "--max-num-seqs", "9")
    args = parse(text, *argv)
    engine = engine_config_of(args)
    assert (engine.model, args.port, args.api_key) == ("/models/b", 2, ["typed"])
    assert (engine.enable_prefix_caching, engine.max_num_seqs) == (False, 9)


def test_list_in_the_file_does_not_include_the_model(parse):
    args = parse("api-key: [a, b]\n", "/models/b")
    assert (args.model_tag, args.api_key) == ("/models/b", ["a", "b"])


def test_empty_file_changes_nothing(parse):
    assert engine_config_of(parse("# nothing\n")) == engine_config_of(build_parser().parse_args(["serve"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modle-len: 5", "'max-modle-len' is not a flag of this command. Did you mean max-model-len"),
        ("config: other.yaml", "'config'"),
        ("max-model-len: long", "--max-model-len"),
        ("port: true", "--port"),
        ("- a\n- b", "`flag: value`"),
        ("a: [", "is not YAML"),
        ("dtype: int3", "invalid choice: 'int3'"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "'max-num-seqs' and 'max_num_seqs' set the same flag: keep one of them"),
        ("enable-lora: true\nno-enable-lora: true", "'enable-lora' and 'no-enable-lora' set the same flag"),
        ("drain-timeout: 1\nshutdown_timeout: 2", "'drain-timeout' and 'shutdown_timeout' set the same flag"),
        ("port: 1\nhost: a\nport: 2", "the key 'port' is in line 1 and again in line 3: keep one of them"),
        ("hf-overrides: {a: 1, b: {c: 1, c: 2}}", "the key 'c' is in line 1 and again in line 1"),
        ("model: a\nmodel-tag: null", "'model' and 'model-tag' set the same flag"),
    ],
)
def test_error_names_an_invalid_entry(parse, capsys, text, message):
    assert message in usage_error(capsys, parse, text)


def test_a_key_beside_one_that_is_merged_is_no_duplicate(parse):
    merged = "hf-overrides: {first: &a {x: 1}, second: {<<: *a, x: 2}, third: {<<: *a}}"
    overrides = engine_config_of(parse(merged)).hf_overrides
    assert overrides == {"first": {"x": 1}, "second": {"x": 2}, "third": {"x": 1}}


def test_missing_file_is_reported(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--config", "/nowhere.yaml"])
    assert "/nowhere.yaml: cannot be read: No such file" in capsys.readouterr().err
