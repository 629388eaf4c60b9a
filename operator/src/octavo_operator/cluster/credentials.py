"""Who we are to the API server: one configuration for our own client and for kopf's.

A service account's token is replaced in its file long before it ends, every hour or so. Both read it anew for each
request, not more often than `REREAD_S`: a client that kept the one of its start would be locked out.
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
    """Of the pod that we are in, else of the user's kubeconfig."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if host and port and (ACCOUNT / "token").exists():
        host = f"[{host}]" if ":" in host else host
        return account_configuration(f"https://{host}:{port}", ACCOUNT)
    found = Configuration()
    await config.load_kube_config(client_configuration=found)  # type: ignore[no-untyped-call]
    return found


def account_configuration(
    url: str, folder: Path, *, reread_s: float = REREAD_S, clock: Callable[[], float] = time.monotonic
) -> Configuration:
    """`folder`: with `token` and `ca.crt`, as pods have it."""
    found = Configuration(host=url)
    if (folder / "ca.crt").exists():
        found.ssl_ca_cert = str(folder / "ca.crt")
    read_s = float("-inf")

    def reread(configuration: Configuration) -> None:
        nonlocal read_s
        if clock() - read_s >= reread_s:
            configuration.api_key[BEARER] = f"Bearer {(folder / 'token').read_text().strip()}"
            read_s = clock()

    reread(found)  # the client asks for a token anew only where there is one
    found.refresh_api_key_hook = reread  # type: ignore[assignment]  # declared as None
    return found


def make_client(configuration: Configuration) -> ApiClient:
    """Its own session would look for proxies and a .netrc before each request, in a thread."""
    api = ApiClient(configuration)
    api.rest_client.pool_manager = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=_trust(configuration)))
    return api


def kopf_login(configuration: Configuration, *, pause_s: float = 1.0) -> Callable[..., object]:
    """A login handler for kopf. It asks again after each 401, at once and for ever: then `pause_s` is waited."""
    logins = 0

    async def log_in(**_: object) -> kopf.AiohttpSession:
        nonlocal logins
        if logins:
            await asyncio.sleep(pause_s)
        logins += 1
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=make_session(configuration))

    return log_in


def make_session(configuration: Configuration, *, answer_s: float = ANSWER_S) -> aiohttp.ClientSession:
    """`answer_s`: a server that has only just come up may leave a request hanging, which kopf would wait for."""

    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        token = await configuration.get_api_key_with_prefix(BEARER)
        if token:
            request.headers["Authorization"] = token
        async with asyncio.timeout(answer_s):  # until it begins: a watch goes on for long
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
