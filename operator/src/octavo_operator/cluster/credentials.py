"""Credentials for the API server: one configuration for the operator's own client and for kopf's.

The kubelet replaces a service account's token file about every hour, well before the token expires. Both clients reread
the file before a request, at most every `REREAD_S` seconds: the first token would expire.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import kopf
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REREAD_S = 10.0
ANSWER_S = 5.0
BEARER = "BearerToken"


async def load_configuration() -> Configuration:
    """Load the service account of this pod or, outside a pod, the user's kubeconfig."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if host and port and (ACCOUNT / "token").exists():
        host = f"[{host}]" if ":" in host else host
        return account_configuration(f"https://{host}:{port}", ACCOUNT)
    configuration = Configuration()
    await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return configuration


def account_configuration(
    url: str, folder: Path, *, reread_s: float = REREAD_S, clock: Callable[[], float] = time.monotonic
) -> Configuration:
    """Configuration of a pod's service account. `folder`: folder with the files `token` and `ca.crt`."""
    account = Configuration(host=url)
    if (folder / "ca.crt").exists():
        account.ssl_ca_cert = str(folder / "ca.crt")
    read_s = float("-inf")

    def reread(configuration: Configuration) -> None:
        nonlocal read_s
        if clock() - read_s >= reread_s:
            configuration.api_key[BEARER] = f"Bearer {(folder / 'token').read_text().strip()}"
            read_s = clock()

    reread(account)  # the client calls the hook only if there is a token
    account.refresh_api_key_hook = reread  # type: ignore[assignment]  # declared as None
    return account


def make_client(configuration: Configuration) -> ApiClient:
    """Make a client with our own session: the client's session looks for proxies and a .netrc before each request."""
    api = ApiClient(configuration)
    api.rest_client.pool_manager = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=_trust(configuration)))
    return api


def kopf_login(configuration: Configuration, *, pause_s: float = 1.0) -> Callable[..., object]:
    """Make kopf's login handler. kopf calls it after each 401, at once and forever: a repeat first waits `pause_s`."""
    logins = 0

    async def log_in(**_: object) -> kopf.AiohttpSession:
        nonlocal logins
        if logins:
            await asyncio.sleep(pause_s)
        logins += 1
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=make_session(configuration))

    return log_in


def make_session(configuration: Configuration, *, answer_s: float = ANSWER_S) -> aiohttp.ClientSession:
    """Make an HTTP session. `answer_s`: seconds until the response headers must arrive: a server that has just started
    may never answer a request."""

    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        token = await configuration.get_api_key_with_prefix(BEARER)
        if token:
            request.headers["Authorization"] = token
        async with asyncio.timeout(answer_s):  # limits only the time until the response begins: a watch stays open
            return await handler(request)

    connector = aiohttp.TCPConnector(limit=0, ssl=_trust(configuration))
    return aiohttp.ClientSession(connector=connector, middlewares=(authorize,))


def _trust(configuration: Configuration) -> ssl.SSLContext | bool:
    if urlsplit(configuration.host).scheme != "https":
        return True
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
