"""The tenants file: its values, its faults, and what happens when it changes while a server runs."""

import logging

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.http.api_keys import CHECK_EVERY_S
from octavo_server.http.tenants_file import NO_LIMITS, TenantLimits, TenantsFile
from octavo_testing.clock import Clock

FILE = """
default: {weight: 2, requestsPerMinute: 60, tokensPerMinute: 1000}
tenants:
  alice: {weight: 0.5, requestsPerMinute: null, maxTokens: 7}
  bob: {concurrentRequests: 1000000000}
"""


def limits_of(**fields):
    return NO_LIMITS.model_copy(update=fields)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tenants.yaml").write_text(FILE)
    return tmp_path / "tenants.yaml"


@pytest.fixture
def follow(path):
    """Return the file, and a function that reads one tenant's limits a second later."""
    clock = Clock()
    file = TenantsFile(path, clock)

    def limits(tenant):
        clock.now_s += CHECK_EVERY_S
        return file.limits(tenant)

    return limits


def test_without_a_file_no_tenant_has_limits():
    file = TenantsFile(None)
    assert (file.is_given, file.limits("alice")) == (False, NO_LIMITS)


def test_what_a_tenant_does_not_set_is_the_default(follow):
    default = {"weight": 2.0, "requests_per_minute": 60, "tokens_per_minute": 1000}
    assert follow("alice") == limits_of(**default | {"weight": 0.5, "requests_per_minute": None, "max_tokens": 7})
    assert follow("bob") == limits_of(**default, concurrent_requests=10**9)
    assert follow("") == follow("carol") == limits_of(**default)


@pytest.mark.parametrize("value", ["0", "-1", ".nan", ".inf", "1000000001", "'1'", "true", "[1]", "null"])
def test_a_weight_is_a_number_of_a_bounded_size(path, value):
    path.write_text(f"tenants: {{alice: {{weight: {value}}}}}")
    with pytest.raises(StartupError, match="tenants: alice: weight: Input should be"):
        TenantsFile(path)


@pytest.mark.parametrize("field", ["requestsPerMinute", "tokensPerMinute", "concurrentRequests", "maxTokens"])
@pytest.mark.parametrize("value", ["0", "-1", ".nan", "1000000001", "1.5", "'1'", "true", "{}"])
def test_a_limit_is_a_whole_number_of_a_bounded_size(path, field, value):
    path.write_text(f"default: {{{field}: {value}}}")
    with pytest.raises(StartupError, match=f"default: {field}: Input should be"):
        TenantsFile(path)


UNUSABLE = {
    "": "Input should be a mapping of fields",
    "[]": "Input should be a mapping of fields",
    "alice: {weight: 1}": "alice: it is no field: the fields here are default, tenants.",
    "tenants: {alice: {requests: 1}}": "alice: requests: it is no .* weight, requestsPerMinute, .*, maxTokens.",
    "tenants: {alice: {max_tokens: 1}}": "max_tokens: it is no field",
    "tenants:": "tenants: Input should be a mapping",
    "tenants: {alice: }": "alice: Input should be a mapping",
    "tenants: {1: {}}": "Input should be a valid string",
    "tenants: {alice: {weight: 1}, alice: {weight: 2}}": "'alice' is in line 1 and again",
    "tenants: {alice: {weight: 1": "is not YAML",
    "tenants: \x00": "is not YAML",
}


@pytest.mark.parametrize("text", UNUSABLE)
def test_an_unusable_file_is_refused_at_start_and_ignored_later(path, follow, caplog, text):
    before = follow("alice")
    path.write_text(text)
    with pytest.raises(StartupError, match=UNUSABLE[text]) as refused:
        TenantsFile(path)
    assert str(refused.value).startswith(f"--tenants-file {path}: ")
    with caplog.at_level(logging.INFO):
        assert [follow("alice") for _ in range(3)] == [before] * 3
    (record,) = caplog.records
    assert record.message == f"the limits of tenants stay as they are: {refused.value}"


def test_a_file_that_vanishes_changes_nothing_until_it_is_back(path, follow, caplog):
    before = follow("alice")
    path.unlink()
    assert [follow("alice") for _ in range(3)] == [before] * 3
    (record,) = caplog.records
    assert "cannot be read: No such file" in record.message
    path.write_text("tenants: {alice: {weight: 3}}")
    assert (follow("alice"), follow("bob")) == (limits_of(weight=3.0), NO_LIMITS)


def test_a_removed_tenant_has_the_default(path, follow):
    path.write_text("default: {maxTokens: 3}\n")
    assert follow("alice") == limits_of(max_tokens=3)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(StartupError, match="Is a directory"):
        TenantsFile(tmp_path)


@pytest.mark.parametrize(
    ("weight", "max_tokens", "limits"),
    [
        (b"2.5", None, limits_of(weight=2.5)),
        (b"1.0", b"7", limits_of(max_tokens=7)),
        (None, None, None),
        *[(weight, None, None) for weight in (b"0", b"-1", b"nan", b"inf", b"1e10", b"", b"x", b"\xff")],
        *[(b"1.0", max_tokens, None) for max_tokens in (b"0", b"-3", b"1.5", b"9" * 5000)],
    ],
)
def test_headers_of_a_router_are_read_if_they_are_valid(weight, max_tokens, limits):
    assert TenantLimits.of_headers(weight, max_tokens) == limits
