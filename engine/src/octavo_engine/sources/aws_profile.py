"""Reads a profile from `~/.aws/credentials` and `~/.aws/config`, for an S3 client that reads only the environment.

Supported are static keys, region and endpoint; a profile without static keys (SSO, a role, a process) raises an error.
"""

from collections.abc import Mapping
from configparser import ConfigParser, Error
from pathlib import Path

from octavo_engine.wire.errors import StartupError

_OPTIONS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
#: If one of these variables is set, the profile's keys are not used.
_KEYS_OF_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_FROM_ENVIRONMENT = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
}


def profile_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return the profile's options for the S3 client, without those that the environment sets. Raises StartupError."""
    profile, home = env.get("AWS_PROFILE", ""), Path(env.get("HOME", "/nonexistent")) / ".aws"
    name = profile or "default"
    credentials = _section(Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"), name)
    config_name = name if name == "default" else f"profile {name}"
    section = _section(Path(env.get("AWS_CONFIG_FILE") or home / "config"), config_name) | credentials
    options = {ours: section[theirs] for theirs, ours in _OPTIONS.items() if section.get(theirs)}
    for option, names in _FROM_ENVIRONMENT.items():
        if any(env.get(name) for name in names):
            options.pop(option, None)
    if any(env.get(name) for name in _KEYS_OF_ENVIRONMENT):
        return {option: value for option, value in options.items() if option in _FROM_ENVIRONMENT}
    if profile and "access_key_id" not in options:
        what = "has no static keys" if section else "is in neither ~/.aws/credentials nor ~/.aws/config"
        raise StartupError(
            f"AWS_PROFILE={profile}: the profile {what}. Put its keys into the environment: "
            f'eval "$(aws configure export-credentials --profile {profile} --format env)"'
        )
    return options


def _section(path: Path, name: str) -> dict[str, str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (Error, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    return dict(parser[name]) if parser.has_section(name) else {}
