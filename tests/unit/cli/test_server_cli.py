"""The command line: vLLM's names and defaults, sizes, errors, and a quick help."""

import argparse
import json
import socket
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.settings.arg_types import size, size_or_auto
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.declare import all_settings, setting
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import SeqResult, StepResult
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_server.cli.main import build_parser, main
from octavo_server.cli.serve import engine_config_of, server_config_of
from octavo_server.http.listener import bind
from octavo_testing.usage_errors import usage_error


def parse(*argv):
    return build_parser().parse_args(["serve", *argv])


def settings(*argv):
    args = parse(*argv)
    return server_config_of(args, engine_config_of(args))


def help_of_serve():
    (commands,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return commands.choices["serve"].format_help()


def test_config_has_the_defaults_without_flags():
    config = engine_config_of(parse())
    assert config == EngineConfig(served_model_name=(config.model,))
    assert settings().served_model_names == (config.model,)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["/models/a"], "model", "/models/a"),
        (["--model", "/models/a"], "model", "/models/a"),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--max-model-len", "32k"], "max_model_len", 32_000),
        (["--max-model-len", "32K"], "max_model_len", 32_768),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--kv-cache-memory-bytes", "1.5G"], "kv_cache_memory_bytes", 3 * 2**29),
        (["--max-num-batched-tokens=4k"], "max_num_batched_tokens", 4000),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--enable-chunked-prefill"], "enable_chunked_prefill", True),
        (["--scheduling-policy", "priority"], "scheduling_policy", "priority"),
        (["--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
        (["--max-logprobs", "-1"], "max_logprobs", -1),
        (["--seed", "7"], "seed", 7),
        (["--swap-space", "4"], "swap_space", 4.0),
        (["--trace", "t.msgpack"], "trace", "t.msgpack"),
    ],
)
def test_flag_sets_its_field(argv, field, value):
    assert getattr(engine_config_of(parse(*argv)), field) == value


@pytest.mark.parametrize(
    "argv",
    [
        ["--dtype", "int3"],
        ["--max-model-len", "long"],
        ["--max-model-len", "-5"],
        ["--block-size", "1.5"],
        ["--max-model", "10"],
        ["--allowed-origins", "*"],
        ["--port", "99999"],
        ["--port", "http"],
    ],
    ids=" ".join,
)
def test_unsupported_flags_are_rejected(argv, capsys):
    assert argv[0] in usage_error(capsys, parse, *argv)


@pytest.mark.parametrize(
    ("flag", "text", "limit"),
    [
        ("--gpu-memory-utilization", "7", "between 0.01 and 1.0"),
        ("--max-num-seqs", "0", "at least 1"),
        ("--max-schema-depth", "121", "between 1 and 120"),
    ],
)
def test_a_flag_out_of_range_names_its_limit(flag, text, limit, capsys):
    assert f"argument {flag}: '{text}' must be {limit}" in usage_error(capsys, parse, flag, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMore(EngineConfig):
    dummy: int = setting(4, "Number of dummies.", ge=1, le=9)


def test_a_setting_of_one_line_has_flag_help_range_and_key_of_the_file(monkeypatch, tmp_path, capsys):
    for module in ("octavo_engine.settings.engine_args", "octavo_server.cli.flags", "octavo_server.cli.serve"):
        monkeypatch.setattr(f"{module}.EngineConfig", OneMore)
    (tmp_path / "serve.yaml").write_text("dummy: 6")
    given = ([], ["--dummy", "5"], ["--config", str(tmp_path / "serve.yaml")])
    assert [engine_config_of(parse(*argv)).dummy for argv in given] == [4, 5, 6]
    assert "--dummy N Number of dummies. Default: 4." in " ".join(help_of_serve().split())
    with pytest.raises(SystemExit):
        parse("--dummy", "10")
    assert "argument --dummy: '10' must be between 1 and 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--prot", "80"], "octavo serve: error: unrecognized arguments: --prot. Did you mean --port or "),
        (["serve", "m", "--max_modle_len=9"], "--max_modle_len=9. Did you mean --max-model-len or "),
        (
            ["route", "--replcia", "http://x"],
            "octavo route: error: unrecognized arguments: --replcia http://x. Did",
        ),
        (["bench", "serve", "--bsae_url", "x"], "octavo bench serve: error: unrecognized arguments: --bsae_url x. Did"),
        (["chat", "--xyzzy"], "octavo chat: error: unrecognized arguments: --xyzzy\n"),
        (["serve", "a", "b"], "octavo serve: error: unrecognized arguments: b\n"),
        (["--vresion"], "octavo: error: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unknown_flag_is_rejected_with_a_suggestion(argv, message, capsys):
    assert message in usage_error(capsys, build_parser().parse_args, argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-tp", "2", "--async-scheduling"], "tensor_parallel_size=2 is not supported with async_scheduling"),
        (["-pp", "2", "--async-scheduling"], "pipeline_parallel_size=2 is not supported with async_scheduling"),
        (["-dp", "2"], "data_parallel_size=2 is not supported"),
        (["--quantization", "modelopt"], "quantization='modelopt' is not supported"),
        (["--lora-modules", "a=/x"], "needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "lora_modules='a' names no adapter"),
        (["--tokenizer-mode", "mistral"], "tokenizer_mode='mistral' is not supported"),
        (["--override-generation-config", '{"top_q": 1}'], "fields of temperature, top_p"),
        (["--default-chat-template-kwargs", '{"tools": []}'], "can't set tools"),
        (["--enable-log-outputs"], "needs --enable-log-requests"),
        (["--ssl-keyfile", "/nowhere.pem"], "add --ssl-certfile"),
        (["--ssl-certfile", "/nowhere.pem"], "TLS can't start with /nowhere.pem"),
        (["--uds", "/nowhere/socket"], "cannot listen on /nowhere/socket"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_the_engine_rejects_are_one_line(argv, message, capsys):
    assert main(["serve", *argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: ")
    assert message in line


def test_flags_of_features_that_are_always_on_are_accepted():
    flags = (
        "--no-enforce-eager",
        "--no-enable-lora",
        "--no-async-scheduling",
        "--enable-prompt-tokens-details",
        "--enforce-eager",
        "-tp",
        "1",
        "--prefix-caching-hash-algo",
        "sha256",
    )
    engine_config_of(parse(*flags, "--tokenizer-mode", "auto", "--kv-cache-dtype", "auto"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("half", "float16"), ("fp16", "float16"), ("float", "float32"), ("fp32", "float32"), ("bf16", "bfloat16")],
)
def test_dtypes_have_the_same_short_names_as_in_a_script(name, dtype):
    assert engine_config_of(parse("--dtype", name)).dtype == resolve_config(dtype=name).dtype == dtype


def test_every_field_of_the_engine_has_a_flag_with_help():
    assert {declared.name for declared in all_settings(EngineConfig)} == {f.name for f in fields(EngineConfig)}


def test_help_shows_every_default():
    text = " ".join(help_of_serve().split())
    for expected in ("Default: 16.", "8192 on a GPU, else 2048.", "Default: 256.", "Default: 0.01.", "Default: fcfs."):
        assert expected in text


def test_api_keys_come_from_the_flag_or_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "from-vllm")
    assert settings().api_key == ("from-vllm",)
    monkeypatch.setenv("OCTAVO_API_KEY", "ours")
    assert settings().api_key == ("ours", "from-vllm")
    assert settings("--api-key", "a", "b").api_key == ("a", "b")


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("True", True), ("0", False), ("", False)])
def test_updates_of_adapters_are_allowed_by_the_environment(monkeypatch, value, allowed):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", value)
    assert settings().allows_adapter_updates is allowed


@pytest.mark.parametrize(
    ("text", "value"), [("1024", 1024), ("1k", 1000), ("1K", 1024), ("2M", 2**21), ("25.6k", 25600)]
)
def test_sizes_accept_suffixes(text, value):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "-1", "nan", "infG", "1.0001k", "1KB"])
def test_invalid_sizes_are_rejected(text):
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def test_auto_is_not_a_size():
    assert size_or_auto("auto") is None
    assert size_or_auto("-1") is None


def test_port_in_use_is_one_line_that_names_it(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port"):
            bind("127.0.0.1", port)
        assert main(["serve", "--host", "127.0.0.1", "--port", str(port)]) == 1
    assert capsys.readouterr().err.strip().count("\n") == 0


def test_invalid_port_is_rejected():
    with pytest.raises(StartupError, match="cannot listen"):
        bind("127.0.0.1", 99999)


def test_help_imports_no_heavy_module():
    code = (
        "import sys, octavo_server.cli.main as m\n"
        "try: m.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'pydantic', 'tokenizers', 'zmq', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-model-len" in done.stdout


def test_api_process_imports_neither_torch_nor_transformers():
    code = (
        "import sys, octavo_server.cli.serve, octavo_server.openai.api_server\n"
        "heavy = {'torch', 'transformers', 'triton', 'numpy', 'kubernetes'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


CONFIG = SchedulerConfig(max_model_len=64, num_blocks=8, block_size=4)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        scheduler = TracingScheduler(CONFIG, file.write)
        params = SamplingParams(max_tokens=2, temperature=0)
        scheduler.add(EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=params), 0.0)
        for step in range(2):
            plan = scheduler.step(float(step))
            seqs = [SeqResult(seq_id=seq.seq_id, token_ids=[7]) for seq in plan.seqs]
            scheduler.commit(StepResult(step_id=plan.step_id, seqs=seqs), step + 0.5)
    return path


def test_replay_reports_that_every_decision_is_the_same(trace, capsys):
    assert main(["replay", str(trace)]) == 0
    assert "every decision is the same" in capsys.readouterr().out


def test_replay_of_a_changed_trace_fails_and_names_the_decision(trace, capsys):
    head, *rest = trace.read_text().splitlines(keepends=True)
    changed = json.loads(head)
    changed["config"]["max_num_batched_tokens"] = 2
    trace.write_text(json.dumps(changed) + "\n" + "".join(rest))
    assert main(["replay", str(trace)]) == 1
    assert "recorded" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "{}\n", "not json\n"], ids=["absent", "empty", "other json", "text"])
def test_invalid_trace_is_one_line(content, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["replay", str(path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
