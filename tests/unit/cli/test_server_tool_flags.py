"""Flags for tools and reasoning: the settings that they give, and errors that list the valid names."""

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.text.template import ChatTemplate
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.main import build_parser
from octavo_server.cli.serve import server_config_of
from octavo_server.cli.server_checks import template_warning
from octavo_server.output_parsing.tool_use import ToolSettings

HERMES = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def config(*argv):
    return server_config_of(build_parser().parse_args(["serve", *argv]), EngineConfig(served_model_name=("m",)))


@pytest.mark.parametrize(
    ("argv", "tools", "reasoning"),
    [
        ([], ToolSettings(), None),
        (HERMES, ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True), None),
        (HERMES[1:], ToolSettings(tool_call_parser="hermes"), None),
        (["--reasoning-parser", "qwen3"], ToolSettings(), "qwen3"),
        (["--reasoning-parser", ""], ToolSettings(), None),
    ],
)
def test_flags_set_the_tool_settings(argv, tools, reasoning):
    found = config(*argv)
    assert (found.tools, found.reasoning_parser) == (tools, reasoning)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tool-call-parser", "herms"], "hermes, llama3_json, mistral, pythonic"),
        (["--enable-auto-tool-choice"], "needs --tool-call-parser: one of hermes"),
        (["--reasoning-parser", "r1"], "deepseek_r1, qwen3"),
    ],
)
def test_error_lists_the_valid_names(argv, says):
    with pytest.raises(StartupError, match=says):
        config(*argv)


@pytest.mark.parametrize(
    ("parser", "template", "warns"),
    [
        ("hermes", "{{ messages }}", True),
        ("hermes", None, True),
        ("hermes", "{{ tools }}", False),
        (None, None, False),
    ],
)
def test_template_without_tools_gives_a_warning(parser, template, warns):
    found = template_warning(parser, None if template is None else ChatTemplate(template))
    assert (found is not None) == warns
