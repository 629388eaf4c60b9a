"""Chat templates: their variables, their errors and their sources."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.text import template as template_module
from octavo_engine.text.messages import MessageRules, normalise_messages
from octavo_engine.text.template import ChatTemplate, load_chat_template
from octavo_engine.wire.errors import InvalidRequest, StartupError
from octavo_testing.tiny_tokenizers import byte_level_tokenizer

USER = [{"role": "user", "content": "Hi"}]
PLAIN = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'system' %}\n"
    "[{{ m.content }}]\n"
    "    {% else %}\n"
    "{{ m.role + ': ' + m['content'] }}\n"
    "    {% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _files(**changes: Any) -> ModelFiles:
    return ModelFiles(**{"name": "m", "root": Path("/nonexistent"), "load_format": "dummy", "config": {}} | changes)


def test_blocks_leave_no_blank_lines() -> None:
    text = ChatTemplate(PLAIN, {"bos_token": "<s>"}).render([{"role": "system", "content": "be kind"}, *USER])
    assert text == "<s>[be kind]\nuser: Hi\nassistant:"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{# developer #}{# for developers #}{{ messages[0].role }}", "system"),
        ("For developers, by a developer: {{ messages[0].role }}", "For developers, by a developer: system"),
        ("{{ 'Act as a developer.' if messages[0].role == 'user' }}{{ messages[0].role }}", "system"),
        (
            "{{ 'knows ' if messages[0].role == 'developer' }}{{ messages[0].role }}{{ messages[0].content }}",
            "knows developerx",
        ),
        (
            "{% set m = messages[0] %}{% if m['role'] in ['system', 'developer'] %}{{ m.role + m.content }}{% endif %}",
            "developerx",
        ),
        ("{{ {'system': 'S', 'developer': 'D'}[messages[0].role] }}{{ messages[0].content }}", "Dx"),
        ("{{ messages[0].role + messages[0].content if messages[0].role != 'developer' }}", "systemx"),
    ],
)
def test_the_developer_role_becomes_system_for_other_templates(source: str, text: str) -> None:
    assert ChatTemplate(source).render([{"role": "developer", "content": "x"}]) == text


def test_arguments_may_have_any_name() -> None:
    assert (
        ChatTemplate("{{ self_ }}{{ messages[0].content }}").render(USER, **dict.fromkeys(("self", "self_"), 2))
        == "2Hi"
    )


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "é"}'}}]}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("{{ args | tojson }}", '{"a": "é"}'),
        ("{% for key, value in args.items() %}{{ key }}={{ value }}{% endfor %}", "a=é"),
        ("{{ 'f ' + args + '!' }}", 'f {"a": "é"}!'),
        ("{{ args ~ '!' }}", '{"a": "é"}!'),
        ("{{ args is mapping }}", "True"),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_arguments_are_an_object_and_text(arguments: Any, expression: str, text: str) -> None:
    message = {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    source = "{% set args = messages[0].tool_calls[0].function.arguments %}" + expression
    assert ChatTemplate(source).render([message]) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if messages[0]['content'] is none %}calls{% endif %}", "calls"),
        ("{% if messages[0].content is not none %}text{% else %}calls{% endif %}", "calls"),
        ("{{ messages[0].content + 'x' }}", "x"),
        ("{# content is none #}{{ messages[0].content }}", ""),
        ("{% if messages[0].content == none %}calls{% endif %}", "calls"),
        ("{% if messages[0].reasoning_content is none %}{% endif %}{{ messages[0].content + 'x' }}", "x"),
    ],
)
def test_null_content_of_calls_is_kept_if_the_template_tests_it(source: str, text: str) -> None:
    assert ChatTemplate(source).render([CALL]) == text


@pytest.mark.parametrize("body", ["{{ m.content }}", "{{ m.content | length }}"])
def test_null_content_of_calls_is_empty_text_if_the_template_tests_it_but_cannot_render_it(body: str) -> None:
    source = (
        "{% for m in messages %}{% if m.content is none and not m.tool_calls %}-{% else %}BODY{% endif %}{% endfor %}"
    )
    rendered = ChatTemplate(source.replace("BODY", body)).render([CALL])
    assert rendered == ChatTemplate(source.replace("BODY", body)).render([{**CALL, "content": ""}])


def test_other_null_content_is_empty_text() -> None:
    source = "{% if messages[0].content is none %}null{% endif %}"
    assert ChatTemplate(source).render([{"role": "assistant", "content": None}]) == ""


def test_the_generation_prompt_can_be_omitted() -> None:
    assert ChatTemplate(PLAIN).render(USER, add_generation_prompt=False) == "user: Hi\n"


def test_nothing_is_escaped_and_json_keeps_unicode() -> None:
    source = "{{ messages[0].content }}{{ tools | tojson }}{{ tools | tojson(indent=1) }}"
    text = ChatTemplate(source).render([{"role": "user", "content": "<b>&"}], tools=[{"é": "<'>"}])
    assert text == "<b>&" + '[{"é": "<\'>"}]' + '[\n {\n  "é": "<\'>"\n }\n]'


def test_an_empty_list_of_tools_is_none() -> None:
    source = "{{ tools is none }}{{ documents is defined }}"
    assert ChatTemplate(source).render(USER, tools=[]) == ChatTemplate(source).render(USER) == "TrueFalse"


def test_loop_controls_generation_blocks_and_dates_are_supported() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source).render([*USER, *USER]) == "Hi4"


def test_extra_arguments_reach_the_template_but_replace_none() -> None:
    source = "{{ enable_thinking }} {{ messages | length }} {{ bos_token }}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(USER, enable_thinking=False, bos_token="B") == "False 1 B"


class TestContinuing:
    def test_the_text_ends_with_the_last_message(self) -> None:
        source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}"
        messages = [*USER, {"role": "assistant", "content": "The capital is "}]
        text = ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert text == "<user>Hi</user>\n<assistant>The capital is "
        assert messages[-1]["content"] == "The capital is "

    def test_continuing_with_a_generation_prompt_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="cannot both be true"):
            ChatTemplate(PLAIN).render(USER, continue_final_message=True)

    def test_a_template_that_omits_the_last_message_cannot_continue_it(self) -> None:
        with pytest.raises(InvalidRequest, match="omits the last message"):
            ChatTemplate("x").render(USER, add_generation_prompt=False, continue_final_message=True)

    @pytest.mark.parametrize("last", [CALL, {"role": "assistant", "content": None}, {"role": "assistant"}])
    @pytest.mark.parametrize("source", ["{% if m.content is none %}{% endif %}", ""])
    def test_a_message_without_text_cannot_be_continued(self, last: dict[str, Any], source: str) -> None:
        template = ChatTemplate("{% for m in messages %}" + source + "{{ m.content or '' }}{% endfor %}")
        with pytest.raises(InvalidRequest) as caught:
            template.render([*USER, last], add_generation_prompt=False, continue_final_message=True)
        assert caught.value.param == "messages[1].content"


@pytest.mark.parametrize("error", [MemoryError, AssertionError, OSError])
def test_every_error_of_a_rendering_is_a_bad_request(error: type[Exception]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(InvalidRequest, match="cannot render these messages"):
        ChatTemplate("{{ fail() }}").render(USER, fail=fail)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejected these messages: roles must alternate"),
        ("{{ messages[3].content }}", "cannot render these messages: .*no element 3"),
        ("{{ unknown.field }}", "'unknown' is undefined"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
        ("{{ 1e999 }}", "not defined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(1001) %}{% set x = range(1000) %}{% endfor %}", "more than 1000000 items"),
    ],
)
def test_every_rendering_error_is_an_invalid_request(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ChatTemplate(source).render(USER)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_CHARS", 10)
    assert len(ChatTemplate("{% for i in range(10) %}x{% endfor %}").render(USER)) == 10
    with pytest.raises(InvalidRequest, match="more than 10 characters"):
        ChatTemplate("{% for i in range(11) %}x{% endfor %}").render(USER)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_engine.text.template_meter.MAX_CPU_S", -1.0)
    with pytest.raises(InvalidRequest, match="takes longer"):
        ChatTemplate("x").render(USER)


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Jinja: line 2") as caught:
        ChatTemplate("a\n{% if %}")
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "x" + "{% endif %}" * 3000,
        "{% if 1 %}" * 110 + "x" + "{% endif %}" * 110,
        "{% for a in messages %}" * 25 + "x" + "{% endfor %}" * 25,
        "{% if 1 %}" + "{% elif 1 %}" * 3000 + "{% endif %}",
        "{{ " + "[" * 250 + "]" * 250 + " }}",
        "{{ 1" + "+1" * 20000 + " }}",
        "{{ " + "-" * 300 + "1 }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ a" + "|trim" * 2000 + " }}",
        "{% break %}",
        "{{ f(a=1, a=2) }}",
        "{% macro f(a, a) %}{% endmacro %}",
    ],
    ids=range(13),
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source)
    assert caught.value.param == "chat_template"


def test_a_template_may_have_256_kib() -> None:
    source = "{{ messages[0].content }}" + "é" * (template_module.MAX_SOURCE_BYTES // 2 - 13)
    assert ChatTemplate(source + "x").render(USER).startswith("Hié")
    with pytest.raises(InvalidRequest, match="262145 bytes; the limit is 262144") as caught:
        ChatTemplate(source + "xx")
    assert caught.value.param == "chat_template"


class TestLoading:
    def test_the_checkpoints_template_gets_its_special_tokens(self) -> None:
        config = {"eos_token": {"content": "</end>"}, "pad_token": "<pad>", "unk_token": None}
        files = _files(
            chat_template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}", tokenizer_config=config
        )
        loaded = load_chat_template(files, byte_level_tokenizer())
        assert loaded is not None
        assert loaded.render(USER) == "<|start|>|</end>|<pad>|"

    def test_the_users_template_has_precedence_as_text_or_file(self, tmp_path: Path) -> None:
        path = tmp_path / "own.jinja"
        path.write_text("file é {{ messages[0].content }}", encoding="utf-8")
        for override, text in ((str(path), "file é Hi"), ("text {{ messages[0].content }}", "text Hi")):
            loaded = load_chat_template(_files(chat_template="other"), byte_level_tokenizer(), override)
            assert loaded is not None
            assert loaded.render(USER) == text

    @pytest.mark.parametrize(
        ("override", "plain", "with_tools"),
        [
            (None, "D", "T"),
            ("tool_use", "T", "T"),
            ("default", "D", "D"),
            ("rag", "R", "R"),
            ("{{ 'own' }}",) + ("own",) * 2,
        ],
    )
    def test_named_templates_are_chosen_as_by_transformers(
        self, override: str | None, plain: str, with_tools: str
    ) -> None:
        files = _files(chat_template="D", named_chat_templates={"tool_use": "T", "rag": "R"})
        loaded = load_chat_template(files, byte_level_tokenizer(), override)
        assert loaded is not None
        texts = [loaded.render(USER), loaded.render(USER, tools=[]), loaded.render(USER, tools=TOOLS)]
        assert texts == [plain, plain, with_tools]

    def test_a_model_without_a_default_template_names_the_others(self) -> None:
        loaded = load_chat_template(_files(named_chat_templates={"tool_use": "T", "a'}}": "A"}), byte_level_tokenizer())
        assert loaded is not None
        assert loaded.render(USER, tools=TOOLS) == "T"
        with pytest.raises(InvalidRequest, match=r"no default template: .*--chat-template: a'}}, tool_use"):
            loaded.render(USER)

    def test_the_tool_template_gets_all_arguments_and_messages_in_its_form(self) -> None:
        source = "{{ bos_token }}{{ x }}{{ tools | length }}{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
        files = _files(chat_template="{{ messages[0].content }}", named_chat_templates={"tool_use": source})
        loaded = load_chat_template(files, byte_level_tokenizer())
        assert loaded is not None
        options = {"tools": TOOLS, "add_generation_prompt": False, "continue_final_message": True}
        assert loaded.render(USER, x="x", **options) == "<|start|>x1Hi"

    def test_a_model_may_have_no_template(self) -> None:
        assert load_chat_template(_files(), byte_level_tokenizer()) is None

    @pytest.mark.parametrize(
        ("override", "own", "message"),
        [
            ("/no/such/file.jinja", None, "neither a readable file.*templates: none"),
            ("tool_uses", "own", "neither a readable file.*templates: default"),
            (None, "{% if %}", "m: .*not valid Jinja.*--chat-template"),
            ("{% if %}", "fine", "not valid Jinja"),
        ],
    )
    def test_an_unusable_template_is_a_startup_error(self, override: str | None, own: str | None, message: str) -> None:
        with pytest.raises(StartupError, match=message):
            load_chat_template(_files(chat_template=own), byte_level_tokenizer(), override)


CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "call12345", "name": "add", "content": "4"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Thanks <ü>"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "é"}}},
        },
    }
]
TEMPLATES = sorted(Path(os.environ.get("OCTAVO_LLAMA_VOCABS", "/nonexistent"), "templates").glob("*.jinja"))


@pytest.mark.skipif(not TEMPLATES, reason="OCTAVO_LLAMA_VOCABS names no folder with llama.cpp's templates")
@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
@pytest.mark.parametrize("with_tools", [True, False])
def test_real_templates_render_as_transformers_renders_them(path: Path, with_tools: bool) -> None:
    """Both render the same text, with null or empty content of the call, or both raise an error."""
    jinja = pytest.importorskip("transformers.utils.chat_template_utils")
    source = path.read_text(encoding="utf-8")
    messages = CHAT if with_tools else [CHAT[0], CHAT[3], CHAT[4]]
    tools = TOOLS if with_tools else None
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    compiled = jinja._compile_jinja_template(source)
    expected = []
    for keeps_null in (True, False):
        normal = normalise_messages(messages, MessageRules(keeps_null=keeps_null))
        with suppress(TemplateError, TypeError):
            expected.append(compiled.render(messages=normal, tools=tools, add_generation_prompt=True, **tokens))
    if expected:
        text = ChatTemplate(source, tokens).render(messages, tools=tools)
        assert text in expected
        assert text.count("None") == min(each.count("None") for each in expected)
    else:
        with pytest.raises(InvalidRequest):
            ChatTemplate(source, tokens).render(messages, tools=tools)
