from contextlib import nullcontext

import pytest
from octavo_server.api_keys import ApiKeys
from octavo_server.openai.errors import Forbidden, Unauthorized
from octavo_server.router.admin_auth import AdminAuth

ONE = ApiKeys(["k1"])
SECRETS = ApiKeys(["s1", "s2"])


@pytest.fixture
def several(tmp_path):
    file = tmp_path / "keys"
    file.write_text("admin: boss\nteam: k1\n")
    return ApiKeys(paths=[file])


def asks(operators, **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    operators.check({"type": "http", "headers": raw})


def test_without_keys_and_secret_everybody_may():
    asks(AdminAuth())


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ({"authorization": "Bearer boss"}, nullcontext()),
        ({"authorization": "bearer boss"}, nullcontext()),
        ({"x_octavo_secret": "s2"}, nullcontext()),
        ({"authorization": "Bearer k1"}, pytest.raises(Forbidden)),
        ({"authorization": "Bearer s1"}, pytest.raises(Unauthorized)),
        ({"authorization": "Basic boss"}, pytest.raises(Unauthorized)),
        ({"x_octavo_secret": "boss"}, pytest.raises(Unauthorized)),
        ({"x_octavo_secret": ""}, pytest.raises(Unauthorized)),
        ({}, pytest.raises(Unauthorized)),
    ],
)
def test_of_several_keys_only_the_operators(several, headers, outcome):
    with outcome:
        asks(AdminAuth(keys=several, secrets=SECRETS), **headers)


def test_a_single_key_is_the_operators():
    asks(AdminAuth(keys=ONE), authorization="Bearer k1")


def test_with_a_secret_alone_it_takes_the_secret():
    asks(AdminAuth(secrets=SECRETS), x_octavo_secret="s1")
    with pytest.raises(Unauthorized):
        asks(AdminAuth(secrets=SECRETS))
