"""Flags of `octavo serve` for TLS and for a Unix socket, and the settings and checks behind them."""

import argparse
import ssl
from pathlib import Path
from typing import Any

from octavo_engine.wire.errors import StartupError

from octavo_server.config import ServerConfig, TlsSettings


def add_listen_flags(group: Any) -> None:
    group.add_argument(
        "--uds",
        type=Path,
        metavar="FILE",
        help="Unix socket to listen on, instead of --host and --port. Default: none.",
    )
    files = {
        "--ssl-certfile": "Certificate of the server (PEM); turns on HTTPS.",
        "--ssl-keyfile": "Key of --ssl-certfile, unless the file has it.",
        "--ssl-ca-certs": "Certificates of the authorities that sign clients' certificates.",
    }
    for flag, text in files.items():
        group.add_argument(flag, type=Path, metavar="FILE", help=f"{text} Default: none.")
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=[int(mode) for mode in ssl.VerifyMode],
        default=int(ssl.CERT_NONE),
        help="Clients' certificates: 0: ignored, 1: optional, 2: required. Default: 0.",
    )
    group.add_argument(
        "--ssl-ciphers", metavar="TEXT", help="Ciphers of TLS 1.2, in OpenSSL's form. Default: Python's."
    )


def listen_settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerConfig` that these flags set."""
    return {
        "uds": args.uds,
        "tls": TlsSettings(
            certfile=args.ssl_certfile,
            keyfile=args.ssl_keyfile,
            ca_certs=args.ssl_ca_certs,
            cert_reqs=args.ssl_cert_reqs,
            ciphers=args.ssl_ciphers,
        ),
    }


def check_tls(config: ServerConfig) -> None:
    """Check files and ciphers before the model is loaded. Raises StartupError."""
    tls = config.tls
    if tls.certfile is None:
        if tls != TlsSettings():
            raise StartupError(
                "--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need a certificate: add --ssl-certfile."
            )
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certfile, tls.keyfile)
        if tls.ca_certs is not None:
            context.load_verify_locations(tls.ca_certs)
        if tls.ciphers is not None:
            context.set_ciphers(tls.ciphers)
    except (OSError, ValueError) as error:
        files = ", ".join(str(file) for file in (tls.certfile, tls.keyfile, tls.ca_certs) if file is not None)
        raise StartupError(
            f"TLS can't start with {files}: {error}. Give PEM files of one certificate and key."
        ) from error
