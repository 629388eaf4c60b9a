"""Certificates of the metrics API: an authority of the installation, and a server certificate of each operator. Pure.

The authority is kept in a Secret, which all operators read. The leader replaces it after two thirds of its life; until
the end of its life the old certificate stays in the bundle by which the API server checks the operators, so that the
others may answer with it until they have read the Secret again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE, SERVER_LIFE = timedelta(days=365), timedelta(days=30)
#: Certificates are valid from a little before they are made, as clocks differ.
SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Authority:
    """`certificate`, `key`: PEM. `previous`: PEM of the certificate that it has replaced, or empty."""

    certificate: bytes
    key: bytes
    previous: bytes = b""

    @property
    def bundle(self) -> bytes:
        """The certificates by which a client checks the operators."""
        return self.certificate + self.previous


def make_authority(now: datetime, *, previous: bytes = b"") -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "octavo-metrics-api")])
    made = (
        _builder(name, name, key.public_key(), key.public_key(), now, AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, SHA256())
    )
    return Authority(made.public_bytes(Encoding.PEM), _pem(key), previous)


def make_server_certificate(authority: Authority, host: str, now: datetime) -> bytes:
    """Return the PEM text of a certificate for the host, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signing_key = load_pem_private_key(authority.key, password=None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "octavo-operator")])
    made = (
        _builder(name, issuer.subject, key.public_key(), signing_key.public_key(), now, SERVER_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signing_key, SHA256())
    )
    return made.public_bytes(Encoding.PEM) + _pem(key)


def is_due(certificate: bytes, now: datetime) -> bool:
    """Return whether a certificate should be replaced: two thirds of its life are over, or it can't be read."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
    except ValueError:
        return True
    start, end = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    return now >= start + (end - start) * 2 / 3


def renewed(authority: Authority | None, now: datetime) -> Authority:
    """The authority, or a new one if there is none yet or its replacement is due."""
    if authority is None:
        return make_authority(now)
    if not is_due(authority.certificate, now):
        return authority
    return make_authority(now, previous=authority.certificate)


def read_authority(data: Mapping[str, bytes]) -> Authority | None:
    """The authority in the entries of a Secret; None if they are not complete or don't belong together."""
    try:
        authority = Authority(data["ca.crt"], data["ca.key"], data.get("previous.crt", b""))
        public = x509.load_pem_x509_certificate(authority.certificate).public_key()
        key = load_pem_private_key(authority.key, password=None)
        if authority.previous:
            x509.load_pem_x509_certificate(authority.previous)
    except (KeyError, ValueError, TypeError):
        return None
    return authority if isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == public else None


def authority_entries(authority: Authority) -> dict[str, bytes]:
    """The entries of the Secret."""
    previous = {"previous.crt": authority.previous} if authority.previous else {}
    return {"ca.crt": authority.certificate, "ca.key": authority.key, **previous}


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    now: datetime,
    life: timedelta,
) -> x509.CertificateBuilder:
    """Authorities share one name, so certificates name the keys of their issuers, too."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
