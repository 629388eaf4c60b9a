import pytest
from octavo_engine.frontend.request_builder import Frontend, TokenizedPrompt
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.scripted import EOS, VOCAB_SIZE, text_ids, write_byte_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [256, 258], "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 99, "do_sample": true}'
    )
    return folder


@pytest.fixture
def load(folder):
    def make(**fields):
        return Frontend.load(EngineConfig(model=str(folder), load_format="dummy", **fields))

    return make


def build(frontend, prompt="hello", params=None, priority=0, **options):
    resolved = frontend.resolve(params or SamplingParams(), priority=priority)
    return frontend.build(frontend.tokenize(prompt), resolved, request_id="r", priority=priority, **options)


def test_a_request_has_every_optional_field_resolved(load):
    request = build(load())
    assert (request.prompt_token_ids, request.eos_token_id) == (text_ids("hello"), EOS)
    assert request.params.max_tokens == 16
    assert isinstance(request.params.seed, int)
    assert request.params.stop_token_ids == [258]
    assert request.arrival_s > 0


@pytest.mark.parametrize("name", ["disable_any_whitespace", "disable_additional_properties"])
def test_json_settings_hold_for_all_requests(load, name):
    shape = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    plain, settled = load(), load(**{name: True})
    expected = plain.grammar(SamplingParams(structured_outputs=StructuredOutputs(**shape, **{name: True})))
    assert settled.grammar(SamplingParams(structured_outputs=StructuredOutputs(**shape))) == expected
    assert plain.grammar(SamplingParams(structured_outputs=StructuredOutputs(**shape))) != expected


def test_a_whitespace_pattern_of_the_request_counts(load):
    params = SamplingParams(structured_outputs=StructuredOutputs(json_object=True, whitespace_pattern=" ?"))
    assert load(disable_any_whitespace=True).grammar(params) == load().grammar(params)


def test_the_callers_parameters_are_not_changed(load):
    params = SamplingParams(max_tokens=None, bad_words=["a"], stop_token_ids=[3])
    before = repr(params)
    build(load(), params=params)
    assert repr(params) == before


def test_parameters_are_resolved_once_for_all_prompts(load, monkeypatch):
    frontend = load()
    resolved = frontend.resolve(SamplingParams(bad_words=["no"], allowed_token_ids=[1, 2]))
    prompts = [frontend.tokenize(text) for text in ("a", "b")]
    monkeypatch.setattr("octavo_engine.frontend.request_builder.check_ids", lambda param, *_: {"prompt": None}[param])
    monkeypatch.setattr("octavo_engine.wire.sampling.SamplingParams.__post_init__", None)
    monkeypatch.setattr(frontend, "tokenizer", None)
    monkeypatch.setattr(Frontend, "eos_token_id", EOS)
    first, second = [frontend.build(prompt, resolved, request_id="r").params for prompt in prompts]
    assert first.allowed_token_ids is second.allowed_token_ids
    assert first.bad_words_token_ids is second.bad_words_token_ids
    assert first.seed != second.seed
    assert resolved.params.seed is None


def test_ignore_eos_omits_the_other_eos_ids(load):
    assert build(load(), params=SamplingParams(ignore_eos=True, stop_token_ids=[7])).params.stop_token_ids == [7]


def test_max_tokens_none_means_the_rest_of_the_context(load):
    assert build(load(max_model_len=100), params=SamplingParams(max_tokens=None)).params.max_tokens == 95


@pytest.mark.parametrize(
    ("length", "max_tokens", "requested"), [(100, None, 1), (120, None, 1), (95, 6, 6), (100, 1, 1)]
)
def test_beyond_the_context_is_refused_in_vllms_words(load, length, max_tokens, requested):
    with pytest.raises(ContextLengthExceeded) as caught:
        build(load(max_model_len=100), "x" * length, SamplingParams(max_tokens=max_tokens))
    assert str(caught.value).startswith(
        f"This model's maximum context length is 100 tokens. However, you requested {requested} output tokens and "
        f"your prompt contains at least {length} input tokens"
    )


def test_exactly_the_context_is_served(load):
    assert build(load(max_model_len=100), "x" * 95, SamplingParams(max_tokens=5)).params.max_tokens == 5


def test_clamping_cuts_min_tokens_too(load):
    params = SamplingParams(max_tokens=50, min_tokens=40)
    request = build(load(max_model_len=100), "x" * 90, params, clamp_max_tokens=True)
    assert (request.params.max_tokens, request.params.min_tokens) == (10, 10)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, f"allowed_token_ids holds token id {VOCAB_SIZE}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias holds token id -1"),
        ({"stop_token_ids": [999]}, "stop_token_ids holds token id 999"),
        ({"logprobs": 21}, "Requested logprobs of 21, which is greater than the maximum of 20"),
        ({"prompt_logprobs": -1}, "Requested prompt_logprobs of -1"),
        ({"n": 257}, "n=257 outputs run side by side; the limit is 256"),
    ],
)
def test_an_unsupported_request_is_refused_by_name(load, params, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        build(load(), params=SamplingParams(**params))
    assert caught.value.param == next(iter(params))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE}, which is not in the vocabulary of {VOCAB_SIZE}"),
        ([-1], "token id -1"),
        ([1, "x"], "integer token ids"),
        ([True], "integer token ids"),
        ({}, "needs prompt"),
    ],
)
def test_bad_prompts_are_refused(load, prompt, words):
    with pytest.raises(InvalidRequest, match=words):
        build(load(), prompt)


def test_the_whole_vocabulary_as_logprobs_where_allowed(load):
    request = build(load(max_logprobs=-1), params=SamplingParams(logprobs=-1, prompt_logprobs=-1))
    assert (request.params.logprobs, request.params.prompt_logprobs) == (VOCAB_SIZE, VOCAB_SIZE)


def test_seeds_derive_from_the_engines_seed(load):
    one, two, other = load(seed=1), load(seed=1), load(seed=2)
    seeds = [build(one).params.seed for _ in range(4)]
    assert seeds == [build(two).params.seed for _ in range(4)]
    assert len(set(seeds)) == 4
    assert build(other).params.seed != seeds[0]
    assert build(one, params=SamplingParams(seed=5)).params.seed == 5
    assert build(one, params=SamplingParams(temperature=0)).params.seed is None


def test_bad_words_are_tokenised_with_and_without_a_space(load):
    params = SamplingParams(bad_words=["no", " way"])
    words = build(load(), params=params).params.bad_words_token_ids
    assert words == [text_ids(form) for form in ("no", " no", "way", " way")]


@pytest.mark.parametrize("space", [" ", "  ", "   ", "\n", "\n\n", "\t ", " \n", "\u3000"])
def test_white_space_of_a_bad_word_is_banned_as_it_was_sent(load, space):
    params = SamplingParams(bad_words=[space, f"{space}  no"])
    words = build(load(), params=params).params.bad_words_token_ids
    assert words == [text_ids(space), text_ids(f"{space}  no")]


def test_priority_needs_its_policy(load):
    with pytest.raises(InvalidRequest, match="priority=3"):
        build(load(), priority=3)
    assert build(load(scheduling_policy="priority"), priority=3).priority == 3


def test_every_form_of_prompt_is_tokenised(load):
    frontend = load()
    hi = text_ids("hi")
    assert frontend.tokenize("hi") == TokenizedPrompt(text="hi", token_ids=hi)
    assert frontend.tokenize(hi) == TokenizedPrompt(text=None, token_ids=hi)
    assert frontend.tokenize({"prompt": "hi"}) == TokenizedPrompt(text="hi", token_ids=hi)
    salted = frontend.tokenize({"prompt_token_ids": [1], "prompt": "shown", "cache_salt": "s"})
    assert salted == TokenizedPrompt(text="shown", token_ids=[1], cache_salt="s")


def test_defaults_come_from_the_models_generation_config(load, tmp_path):
    assert load().default_sampling_params == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 99}
    assert load(generation_config="vllm").default_sampling_params == {}
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    assert load(generation_config=str(tmp_path)).default_sampling_params == {"top_k": 7}


@pytest.mark.parametrize("content", [None, "not json", "[1]", '{"top_p": 7}', '{"top_p": "x"}'])
def test_an_unusable_generation_config_is_named(load, tmp_path, content):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"generation_config\.json"):
        load(generation_config=str(tmp_path))


def test_a_chat_template_is_read_from_a_file(load, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}?")
    frontend = load(chat_template=str(path))
    assert frontend.template(None).render([{"role": "user", "content": "x"}]) == "x?"


def test_chat_without_a_template_is_refused(load):
    frontend = load()
    frontend.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        frontend.template(None)
