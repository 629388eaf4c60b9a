"""An empty key or secret would give everyone access: it is rejected with the name of its flag or variable."""

import argparse

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.route_flags import add_route_flags, settings_of
from octavo_server.http.api_keys import ApiKeys


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch):
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "OCTAVO_ROUTER_SECRET", "OCTAVO_ADMIN_SECRET"):
        monkeypatch.delenv(name, raising=False)


def settings(*given):
    parser = argparse.ArgumentParser()
    add_route_flags(parser)
    return settings_of(parser.parse_args(["--replica", "http://a", *given]))


@pytest.mark.parametrize("value", ["", " ", "\n"])
@pytest.mark.parametrize("flag", ["--api-key", "--router-secret", "--admin-secret", "--replica-key"])
def test_empty_flag_is_rejected(flag, value):
    with pytest.raises(StartupError, match=f"{flag}.* is empty"):
        settings(flag, value)


@pytest.mark.parametrize("flag", ["--api-key", "--router-secret", "--admin-secret"])
def test_empty_value_among_several_is_rejected(flag):
    with pytest.raises(StartupError, match=flag):
        settings(flag, "good", "")


@pytest.mark.parametrize("name", ["OCTAVO_API_KEY", "VLLM_API_KEY", "OCTAVO_ROUTER_SECRET", "OCTAVO_ADMIN_SECRET"])
def test_empty_variable_is_rejected(monkeypatch, name):
    monkeypatch.setenv(name, "")
    with pytest.raises(StartupError, match=f"{name}.* is empty"):
        settings()


def test_empty_key_is_never_accepted():
    with pytest.raises(StartupError, match="empty"):
        ApiKeys([""])


def test_flags_take_precedence_over_variables(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "of-the-variable")
    assert settings().api_key == ("of-the-variable",)
    assert settings("--api-key", "a", "b", "a").api_key == ("a", "b")
    assert settings("--replica-key", "r").replica_key == "r"
    monkeypatch.setenv("OCTAVO_ADMIN_SECRET", "of-the-variable")
    assert settings().admin_secret == ("of-the-variable",)
    assert settings("--admin-secret", "a", "b").admin_secret == ("a", "b")


def test_admin_port_must_differ_from_port():
    with pytest.raises(StartupError, match="--admin-port"):
        settings("--port", "8000", "--admin-port", "8000")
    assert settings("--port", "0", "--admin-port", "0").admin_port == 0
