"""The certificate authority of an open pond, and what it issues: by TLS, everyone shows who they are before a byte of
gRPC is sent.

It is made anew each time that the pond is opened, and its key never leaves the coordinator's process: what an earlier
opening issued is worth nothing. A certificate says a role, and that of a server its name, too, which for a container
holds its id and its term: what listens where another one did cannot pass for it.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Self

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from millpond import private
from millpond.errors import BadOption, MillpondError
from millpond.wire.roles import ROLES, Role

DOMAIN = "millpond"
HOUR_S = 3600.0
LIFE_S: dict[Role, float] = {
    "coordinator": 30 * 24 * HOUR_S,
    "container": 24 * HOUR_S,
    "client": 30 * 24 * HOUR_S,
    "task": 0.25 * HOUR_S,
    "reader": 30 * 24 * HOUR_S,
}
RENEWED_AT = 1 / 3
"""The part of its life after which a certificate is replaced by a new one."""
# Clocks of machines differ.
_BEFORE = timedelta(minutes=5)
_AUTHORITY_LIFE = timedelta(days=3650)
_SERVERS = ("coordinator", "container")
_PEM_END = "-----END "


class Bundle(msgspec.Struct, frozen=True):
    """What one party has to show by TLS, and by what it knows the others; all in PEM.

    Where the pond was given a certificate of its own for its address, `pinned` is that: no other is believed there.
    """

    certificate: str
    key: str
    authority: str
    pinned: str = ""

    def __repr__(self) -> str:
        return "Bundle()"

    @property
    def serial(self) -> str:
        """By what a certificate is revoked."""
        return f"{x509.load_pem_x509_certificate(self.certificate.encode()).serial_number:x}"

    def text(self) -> str:
        """As a file has it: certificate, key, authority, and what is pinned."""
        return self.certificate + self.key + self.authority + self.pinned

    @classmethod
    def read(cls, path: str) -> Self:
        """From a file as `text` gives it, which is this user's alone."""
        try:
            text = private.read_text(path)
        except OSError as error:
            reason = error.message if isinstance(error, MillpondError) else error.strerror
            hint = ""
            if isinstance(error, MillpondError):
                hint = f"{error.hint}, then copy it from the pond's root anew, to a file of mode 0600"
            raise _not_a_bundle(f"{private.shown(path)} cannot be read: {reason}", hint) from None
        return cls.parse(text, private.shown(path))

    @classmethod
    def parse(cls, text: str, named: str) -> Self:
        blocks = _blocks(text)
        keys = [block for block in blocks if "PRIVATE KEY" in block]
        certificates = [block for block in blocks if "PRIVATE KEY" not in block]
        try:
            for block in certificates:
                x509.load_pem_x509_certificate(block.encode())
        except ValueError:
            certificates = []
        if len(keys) != 1 or len(certificates) not in (2, 3):
            raise _not_a_bundle(f"{named} does not hold a certificate, its key and the pond's authority")
        return cls(certificates[0], keys[0], *certificates[1:])

    def connecting(self, to_pond: bool) -> ssl.SSLContext:
        """For a client: of the address of the pond itself, or of a container's own."""
        return _connecting(self, to_pond and self.pinned != "")

    def serving(self) -> ssl.SSLContext:
        """For a server with this certificate, which lets in whoever has one of the same authority."""
        return serving(self.certificate, self.key, self.authority)


class Authority:
    """Issues certificates. Its key is in this process, and in no file."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{DOMAIN} authority")])
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BEFORE)
            .not_valid_after(now + _AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        )
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.certificate = _pem(self._certificate)
        self.pinned = ""
        """The certificate that the pond was given for its address, for those who are to believe it."""

    def issue(self, role: Role, name: str = "", seconds: float | None = None) -> Bundle:
        """A new certificate and its key: for a server, of the name by which it is to be known."""
        if role not in ROLES or (role in _SERVERS) != (name != ""):
            raise BadOption(f"no certificate is issued to {name!r} as {role!r}", option="role")
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        life = timedelta(seconds=LIFE_S[role] if seconds is None else seconds)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role in _SERVERS:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, now + life) - _BEFORE)
            .not_valid_after(now + life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if name:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.DNSName(server_name(name))]), critical=False
            )
        certificate = builder.sign(self._key, hashes.SHA256())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        return Bundle(_pem(certificate), secret, self.certificate, self.pinned)


def server_name(name: str) -> str:
    """The name in the certificate of the server of that name, as `container-3-t17.millpond`."""
    return f"{name}.{DOMAIN}"


def role_in(certificate: Mapping[str, Any]) -> Role:
    """The role that a certificate says, as `ssl` gives it when it was verified."""
    subject = dict(part for parts in certificate.get("subject", ()) for part in parts)
    for role in ROLES:
        if subject.get("commonName") == role:
            return role
    raise ssl.SSLError("the certificate says no role")


def serving(certificate: str, key: str, authority: str) -> ssl.SSLContext:
    """For a server that shows `certificate`, and lets in whoever has one of `authority`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, certificate, key)
    context.load_verify_locations(cadata=authority)
    context.verify_mode = ssl.CERT_REQUIRED
    # Whoever comes again shows its certificate again: it may have been revoked.
    context.num_tickets = 0
    return _strict(context)


def given(certificate: str, key: str) -> tuple[str, str]:
    """The texts of two files that the user gave, a certificate and its key, if they belong together."""
    texts = []
    for path in (certificate, key):
        try:
            with open(path) as file:
                texts.append(file.read())
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadOption(f"{private.shown(path)} cannot be read: {reason}", option="certificate") from None
    try:
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *texts)
        x509.load_pem_x509_certificate(texts[0].encode())
    except (ssl.SSLError, ValueError):
        raise BadOption(
            f"{private.shown(certificate)} and {private.shown(key)} are not a certificate and its key",
            hint="give two files in PEM; the key without a password",
            option="certificate",
        ) from None
    return texts[0], texts[1]


def first_certificate(text: str) -> str:
    """The one that a server shows as its own; after it come those that vouch for it."""
    return next(block for block in _blocks(text) if "PRIVATE KEY" not in block)


@lru_cache(maxsize=8)
def _connecting(bundle: Bundle, pinned: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        _load(context, bundle.certificate, bundle.key)
    except ssl.SSLError:
        raise _not_a_bundle("the key is not that of the certificate") from None
    context.load_verify_locations(cadata=bundle.pinned if pinned else bundle.authority)
    if pinned:
        # That very certificate, whoever issued it, and whatever it is called.
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return _strict(context)


def _strict(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """`ssl` takes certificate and key from files alone: here from one in memory, where there is such a thing."""
    text = (key + certificate).encode()
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("millpond", os.MFD_CLOEXEC), "wb") as file:
            file.write(text)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return
    handle, path = tempfile.mkstemp(prefix="millpond-")
    try:
        with open(handle, "wb") as file:
            file.write(text)
        context.load_cert_chain(path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _blocks(text: str) -> list[str]:
    """The PEM blocks of a text, in order."""
    blocks: list[str] = []
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("-----BEGIN "):
            lines = []
        lines.append(line)
        if line.startswith(_PEM_END):
            blocks.append("\n".join(lines) + "\n")
    return blocks


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _usage(signs_certificates: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _not_a_bundle(why: str, hint: str = "") -> BadOption:
    return BadOption(
        why,
        hint=hint or "copy client.pem, or client.read.pem, from the root of the pond as it is open now",
        option="certificate",
    )
