"""Check of the files for TLS."""

import ssl

from octavo_engine.wire.errors import StartupError

from octavo_server.config import ServerConfig, TlsSettings


def check_tls(config: ServerConfig) -> None:
    """Check files and ciphers before the model is loaded. Raises StartupError."""
    tls = config.tls
    if tls.ssl_certfile is None:
        if tls != TlsSettings():
            raise StartupError(
                "--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need a certificate: add --ssl-certfile."
            )
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.ssl_certfile, tls.ssl_keyfile)
        if tls.ssl_ca_certs is not None:
            context.load_verify_locations(tls.ssl_ca_certs)
        if tls.ssl_ciphers is not None:
            context.set_ciphers(tls.ssl_ciphers)
    except (OSError, ValueError) as error:
        files = ", ".join(
            str(file) for file in (tls.ssl_certfile, tls.ssl_keyfile, tls.ssl_ca_certs) if file is not None
        )
        raise StartupError(
            f"TLS can't start with {files}: {error}. Give PEM files of one certificate and key."
        ) from error
