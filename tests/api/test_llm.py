"""`LLM` with the scripted executor: forms of prompts, order, errors, Ctrl-C, two objects, use in a plain script."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from octavo_engine import LLM, SamplingParams
from octavo_engine.core.replay import replay_file
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.declare import setting
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo_testing.core_process import SUPPORT
from octavo_testing.scripted import LOADER, scripted, text_ids, write_byte_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_byte_model(tmp_path_factory.mktemp("model")))


def make_llm(model, **arguments):
    return LLM(model=model, load_format="dummy", loader=LOADER, debug_invariants=True, **arguments)


@pytest.fixture(scope="module")
def llm(model):
    return make_llm(model)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    "prompt",
    ["hi", ["hi"], text_ids("hi"), [text_ids("hi")], {"prompt": "hi"}, [{"prompt_token_ids": text_ids("hi")}]],
    ids=["text", "texts", "ids", "id lists", "dict", "dicts"],
)
def test_every_form_of_prompt_is_accepted(llm, prompt):
    (output,) = llm.generate(prompt, scripted("yes"), use_tqdm=False)
    assert (output.prompt_token_ids, output.outputs[0].text) == (text_ids("hi"), "yes")


def test_outputs_are_in_the_order_of_prompts(llm):
    prompts = [f"prompt {i}" for i in range(20)]
    params = [scripted(f"{i} " * (20 - i)) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert texts(outputs) == [f"{i} " * (20 - i) for i in range(20)]
    assert len({output.request_id for output in outputs}) == 20


def test_outputs_have_vllms_names(llm):
    (output,) = llm.generate("hi", scripted("ab", logprobs=0), use_tqdm=False)
    completion = output.outputs[0]
    assert (output.prompt, output.finished, output.prompt_logprobs, output.num_cached_tokens) == ("hi", True, None, 0)
    assert (completion.index, completion.token_ids) == (0, text_ids("ab", eos=True))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.cumulative_logprob == pytest.approx(-0.75)
    assert output.metrics.first_token_s >= output.metrics.arrival_s
    assert completion.timing is not None


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], use_tqdm=False) == []


def test_one_bad_prompt_refuses_all_before_anything_runs(llm):
    steps = llm.stats.steps
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate(["fine", ""], scripted("x"), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="2 entries for 1 prompts"):
        llm.generate("fine", [scripted("x"), scripted("y")], use_tqdm=False)
    with pytest.raises(ContextLengthExceeded):
        llm.generate("x" * 512, scripted("x"), use_tqdm=False)
    with pytest.raises(ValueError, match="priority has 0 entries for 1 prompts"):
        llm.generate("fine", scripted("x"), priority=[], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="sampling_params has 0 entries for 1 prompts"):
        llm.generate("fine", [], use_tqdm=False)
    assert llm.stats.steps == steps


@pytest.mark.parametrize("priority", [1, [1]])
def test_a_priority_has_no_effect_without_priority_scheduling(llm, priority):
    assert texts(llm.generate("fine", scripted("x"), priority=priority, use_tqdm=False)) == ["x"]


def test_max_tokens_is_cut_to_the_context(llm):
    (output,) = llm.generate("x" * 500, scripted("y", eos=False, max_tokens=100), use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (12, "length")


def test_a_failed_step_is_an_error_output_and_the_next_call_works(llm, caplog):
    bad = scripted("abc", extra_args={"fail_at": 1})
    (output,) = llm.generate("hi", bad, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("error", "a")
    assert "scripted failure" in output.error
    assert "scripted failure" in caplog.text
    assert texts(llm.generate("hi", scripted("fine"), use_tqdm=False)) == ["fine"]


def test_ctrl_c_leaves_no_requests_and_a_usable_object(llm):
    interrupted = [scripted("x" * 50, eos=False, extra_args={"interrupt_at": 3}), scripted("y" * 50)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], interrupted, use_tqdm=False)
    assert (llm.stats.running, llm.stats.waiting, llm.stats.in_use_blocks) == (0, 0, 0)
    assert texts(llm.generate("hi", scripted("fine"), use_tqdm=False)) == ["fine"]


def test_two_objects_are_independent(model):
    one, two = make_llm(model, seed=1), make_llm(model, seed=1, max_model_len=64)
    params = SamplingParams(max_tokens=8, extra_args={"replies": [text_ids(c) for c in "abcdefg"]})
    assert texts(one.generate(["p"] * 6, params, use_tqdm=False)) == texts(
        two.generate(["p"] * 6, params, use_tqdm=False)
    )
    one.shutdown()
    assert texts(two.generate("p", scripted("alive"), use_tqdm=False)) == ["alive"]
    assert (one.ready_info.max_model_len, two.ready_info.max_model_len) == (512, 64)


def test_chat_renders_the_template(llm):
    one = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(one, scripted("hey"), use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids[:5] == [257, *text_ids("user")]
    outputs = llm.chat([one, one], scripted("hey"), use_tqdm=False, add_generation_prompt=False)
    assert [o.prompt for o in outputs] == ["<|im_start|>user\nhello<|im_end|>\n"] * 2
    (output,) = llm.chat(one, scripted("hey"), use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert output.prompt == "hello!"
    printed = {"chat_template": "{{ messages[0].content | tojson }}", "chat_template_content_format": "openai"}
    (output,) = llm.chat(one, scripted("hey"), use_tqdm=False, **printed)
    assert output.prompt == '[{"type": "text", "text": "hello"}]'
    with pytest.raises(StartupError, match="string, openai"):
        llm.chat(one, use_tqdm=False, chat_template_content_format="json")


def test_the_progress_bar_shows_token_rates(llm, capsys):
    llm.generate(["a", "b"], scripted("xyz"))
    bar = capsys.readouterr().err
    assert "Processed prompts: 100%" in bar
    assert "output:" in bar
    assert "tok/s" in bar


def test_arguments_and_variables_without_effect_are_named(model, caplog, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "attention_backend": "FLASH_ATTN"}
    make_llm(model, trust_remote_code=True, enforce_eager=True, speculative_config=drafts).shutdown()
    assert [record.message for record in caplog.records if "without effect" in record.message] == [
        "accepted without effect here: speculative_config.attention_backend='FLASH_ATTN', "
        "trust_remote_code=True (no code from checkpoints is ever run)",
        "set without effect here: VLLM_USE_V1",
    ]


def test_default_parameters_can_be_replaced(model):
    llm = make_llm(model, override_generation_config={"top_p": 0.5, "max_new_tokens": 7})
    params = llm.get_default_sampling_params()
    assert (params.top_p, params.max_tokens) == (0.5, 7)


def test_unknown_and_unsupported_arguments_are_errors(model):
    with pytest.raises(TypeError, match=r"'max_model_length' is not an engine argument\. Did you mean max_model_len"):
        LLM(model=model, max_model_length=1)
    with pytest.raises(StartupError, match="data_parallel_size=2 is not supported"):
        LLM(model=model, data_parallel_size=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMore(EngineConfig):
    dummy: int = setting(4, "Number of dummies.", ge=1, le=9)


def test_a_setting_of_one_line_is_an_argument(model, monkeypatch):
    monkeypatch.setattr("octavo_engine.settings.engine_args.EngineConfig", OneMore)
    assert [make_llm(model, **given).config.dummy for given in ({}, {"dummy": 7})] == [4, 7]
    with pytest.raises(StartupError, match="dummy must be between 1 and 9, got 10"):
        LLM(model=model, dummy=10)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("trace", 5, "text"), ("max_step_ms", "", "a number, at least 0"), ("served_model_name", 5, "a list of values")],
)
def test_a_value_of_a_wrong_type_is_refused(name, value, rule):
    with pytest.raises(StartupError, match=f"^{name} must be {rule}, got {value!r}"):
        LLM(**{name: value})


def test_arguments_of_calls_are_never_ignored(llm):
    with pytest.raises(StartupError, match="mm_processor_kwargs='x' is not supported"):
        llm.generate("hi", scripted("x"), mm_processor_kwargs="x")
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_tdqm'"):
        llm.chat([{"role": "user", "content": "hi"}], scripted("x"), use_tdqm=False)
    assert texts(llm.generate("hi", scripted("x"), use_tqdm=False, lora_request=None)) == ["x"]


def test_a_light_install_reports_the_missing_package(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo_missing", None)
    with pytest.raises(
        StartupError, match=r"needs the Python package octavo_missing: pip install 'octavo-engine\[torch"
    ):
        LLM(model=model, load_format="dummy", loader="octavo_missing:load")


def test_a_trace_replays(model, tmp_path):
    path = tmp_path / "trace.jsonl"
    llm = make_llm(model, trace=str(path), num_gpu_blocks_override=12, swap_space=1, max_num_batched_tokens=24)
    llm.generate(
        [f"prompt {i} " * i for i in range(1, 9)], scripted("x" * 30, eos=False, max_tokens=30), use_tqdm=False
    )
    llm.generate("stop", scripted("a STOP b", stop=["STOP"]), use_tqdm=False)
    llm.shutdown()
    report = replay_file(path)
    assert report.divergence is None
    assert (report.num_requests, report.stats.steps) == (9, llm.stats.steps)
    assert report.stats.preemptions > 0


def test_a_trace_that_cannot_be_written_is_refused(model, tmp_path):
    with pytest.raises(StartupError, match=r"--trace: cannot write .*: No such file or directory"):
        make_llm(model, trace=str(tmp_path / "no" / "trace"))


def test_a_script_needs_no_main_guard(model, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from octavo_engine import LLM\n"
        "from octavo_testing.scripted import LOADER, scripted\n"
        f"llm = LLM({model!r}, load_format='dummy', loader=LOADER)\n"
        "print(llm.generate('hi', scripted('from a script'), use_tqdm=False)[0].outputs[0].text)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "from a script\n"
