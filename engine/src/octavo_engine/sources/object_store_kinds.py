"""The object stores that models are read from: which client each has, which variables it reads, and remedies.

Each `StoreKind` follows the variables of its vendor's tools (docs/guide/serving.md); the client, obstore, reads most of
them itself, and `options` adds those it does not know. `store_kind` is the one table of schemes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_engine.wire.errors import StartupError, first_line

if TYPE_CHECKING:
    from obstore.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """One kind of object store. `options`: the client's options from the environment; it may raise StartupError."""

    client: str  # name of the class in obstore.store
    bucket: str  # its users' word for a bucket
    endpoint: str  # name of the client's option for the endpoint
    options: Callable[[Mapping[str, str]], dict[str, Any]]
    ca_bundle: str | None = None  # name of the variable with the path of additional certificates
    credentials: str  # the usual variables with credentials
    anonymous: str  # name of the variable that turns credentials off
    redirected: str = ""  # what to do if the server answers that the request is for another place

    @property
    def remedy(self) -> str:
        """Remedy for denied access."""
        return (
            f"Set {self.credentials} (on Kubernetes: entries of a Secret that spec.model.secretRef names), or "
            f"{self.anonymous}=true for a public {self.bucket}."
        )

    def connect(self, uri: str, bucket: str, env: Mapping[str, str]) -> "ObjectStore":
        """Return a client of a bucket, without sending a request. Raises StartupError for unusable settings."""
        try:
            import obstore.store
            from obstore.exceptions import BaseError
        except ImportError as error:
            raise StartupError(
                f"{uri}: the client of object stores is missing: pip install 'octavo-engine[object-store]'"
            ) from error
        options = self.options(env)
        client: dict[str, Any] = {
            "allow_http": options.get(self.endpoint, "").startswith("http://"),
            "connect_timeout": timedelta(seconds=10),
            "read_timeout": timedelta(seconds=60),
            "timeout": timedelta(days=1),  # for one object
        }
        make = getattr(obstore.store, self.client)
        try:
            if self.ca_bundle and (bundle := env.get(self.ca_bundle)):
                client["root_certificate"] = Path(bundle).read_bytes()
            store: ObjectStore = make(bucket, client_options=client, retry_config={"max_retries": 0}, **options)
        except (OSError, ValueError) as error:
            raise StartupError(f"{uri}: {first_line(error)}") from error
        except BaseError as error:
            what = _PREFIX.sub("", first_line(error)).removesuffix(".")
            raise StartupError(f"{uri}: the credentials or settings cannot be used: {what}. {self.remedy}") from error
        return store


def store_kind(uri: str) -> StoreKind | None:
    """Return the kind of object store that a model's URI names; None for other URIs."""
    scheme, separator, _ = uri.partition("://")
    return _KINDS.get(scheme) if separator else None


_PREFIX = re.compile("^Generic [A-Za-z0-9]+ error: ")


#: If one of these variables is set, a profile is not read.
_AWS_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
#: Time after which boto3 is asked for credentials again: it renews those that expire within 10 minutes.
_PROFILE_TTL = timedelta(minutes=10)


def _s3_options(env: Mapping[str, str]) -> dict[str, Any]:
    profile = env.get("AWS_PROFILE")
    has_credentials = any(env.get(name) for name in _AWS_CREDENTIALS)
    return (_profile_options(profile) if profile and not has_credentials else {}) | _given(
        env,
        endpoint=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        region=("AWS_REGION", "AWS_DEFAULT_REGION"),
    )


def _profile_options(profile: str) -> dict[str, Any]:
    """Return credentials, region and endpoint of an AWS profile, as boto3 reads them. Raises StartupError."""
    remedy = f'eval "$(aws configure export-credentials --profile {profile} --format env)"'
    try:
        from botocore.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise StartupError(
            f"AWS_PROFILE={profile}: boto3, which reads profiles, is missing: pip install boto3, or {remedy}"
        ) from error
    session = Session(profile=profile)
    try:
        settings = session.get_scoped_config()
        provider = Boto3CredentialProvider(session, ttl=_PROFILE_TTL)
        provider()  # reports an expired login at once; a request would fail and be repeated
    except Exception as error:  # a profile may name a program, the output of which boto3 hardly checks
        what = first_line(error)
        raise StartupError(
            f"AWS_PROFILE={profile}: boto3 found no credentials: {what}. Mend it, or {remedy}"
        ) from error
    given = {"endpoint": settings.get("endpoint_url"), "region": settings.get("region")}
    return {"credential_provider": provider} | {option: value for option, value in given.items() if value}


def _gcs_options(env: Mapping[str, str]) -> dict[str, str]:
    return _given(env, base_url=("GOOGLE_BASE_URL",))


def _azure_options(env: Mapping[str, str]) -> dict[str, str]:
    """The second names are those of Azure's command line."""
    options = _given(
        env,
        account_name=("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
        account_key=("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"),
        endpoint=("AZURE_STORAGE_ENDPOINT",),
    )
    if "account_name" not in options:
        raise StartupError("AZURE_STORAGE_ACCOUNT_NAME is not set: set it to the container's storage account.")
    return options


def _given(env: Mapping[str, str], **names: tuple[str, ...]) -> dict[str, str]:
    """Return each option whose variable is set; the first of several variables has precedence."""
    values = {option: next((env[name] for name in known if env.get(name)), "") for option, known in names.items()}
    return {option: value for option, value in values.items() if value}


_S3 = StoreKind(
    client="S3Store",
    bucket="bucket",
    endpoint="endpoint",
    options=_s3_options,
    ca_bundle="AWS_CA_BUNDLE",
    credentials="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    anonymous="AWS_SKIP_SIGNATURE",
    redirected="Check that AWS_REGION is the bucket's region.",
)
_GCS = StoreKind(
    client="GCSStore",
    bucket="bucket",
    endpoint="base_url",
    options=_gcs_options,
    credentials="GOOGLE_SERVICE_ACCOUNT_KEY (the JSON of a key) or GOOGLE_APPLICATION_CREDENTIALS (its path)",
    anonymous="GOOGLE_SKIP_SIGNATURE",
)
_AZURE = StoreKind(
    client="AzureStore",
    bucket="container",
    endpoint="endpoint",
    options=_azure_options,
    credentials="AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    anonymous="AZURE_SKIP_SIGNATURE",
)
_KINDS = {"s3": _S3, "gs": _GCS, "az": _AZURE, "azure": _AZURE}
