"""How a pond and a client show each other that they know its secret, without telling it: pure, without sockets.

    client    role, which server it means, a random number
    pond      a random number, and its signature of all that and of the address at which it was reached
    client    a keyed hash of the same, with the secret of its role
    pond      welcome, or why not

The key that signs follows from the full token; a read-only token carries its public half. So a holder of a read-only
token knows the pond, and cannot pass for it. Random numbers on both sides keep an earlier handshake from being
played again; the address keeps one from being passed on to a pond elsewhere; the name of the server, which each
incarnation of a container has anew, keeps it from being answered by another.

The token itself is never sent: calls carry what follows from it (`bearer`), by which nobody can shake hands.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import struct
from functools import lru_cache
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from millpond.errors import BadMessage, BadOption, NotThePond
from millpond.wire.sockets import NAME_PATTERN

MAGIC = b"millpond gate 1\n"
FULL, READ = b"F", b"R"
HELLO = struct.Struct("!16s1s64s32s")
OFFER = struct.Struct("!32s64s")
PROOF_BYTES = 32
WELCOME, REFUSED, BUSY, GONE = b"W", b"R", b"B", b"G"
_READ_PREFIX = "read."
_FULL_PATTERN = r"[A-Za-z0-9_-]{32,128}\Z"


def address_of(name: Any) -> str:
    """`host:port` of a socket's name, as both sides sign it."""
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Hello(NamedTuple):
    role: bytes
    server: str


class Credentials:
    """What follows from a token: the role, its secret, and by what to know the pond."""

    def __init__(self, token: str) -> None:
        self.role = READ if token.startswith(_READ_PREFIX) else FULL
        if self.role == READ:
            self._secret, self._identity = _parts_of(token)
            return
        if not re.match(_FULL_PATTERN, token):
            raise _not_a_token()
        key = _signing_key(token)
        self._secret = _derived(token, b"millpond full")
        self._identity = key.public_key()

    def hello(self, server: str) -> bytes:
        return HELLO.pack(MAGIC, self.role, server.encode(), secrets.token_bytes(32))

    def proof(self, hello: bytes, offer: bytes, address: str) -> bytes:
        """What to answer a pond that has shown that it is one; else NotThePond."""
        nonce, signature = OFFER.unpack(offer)
        transcript = _transcript(hello, nonce, address)
        try:
            self._identity.verify(signature, transcript)
        except InvalidSignature:
            raise NotThePond(
                f"what listens at {address} is not the pond of this token; it was told nothing",
                hint="is the pond open at this address, and the token the one in its root now? A tunnel must keep"
                " the pond's port",
                address=address,
            ) from None
        return hmac.digest(self._secret, transcript, "sha256")


class Doorkeeper:
    """The pond's side."""

    def __init__(self, token: str) -> None:
        self._key = _signing_key(token)
        reading, _ = _parts_of(read_only_token(token))
        self._secrets = {FULL: _derived(token, b"millpond full"), READ: reading}

    def heard(self, hello: bytes) -> Hello:
        """What a client says that it is; BadMessage if it is no client."""
        magic, role, server, _ = HELLO.unpack(hello)
        name = server.rstrip(b"\0").decode("ascii", "replace")
        if magic != MAGIC or role not in self._secrets or not re.match(NAME_PATTERN, name):
            raise BadMessage("a connection did not begin with a handshake of this version")
        return Hello(role, name)

    def offer(self, hello: bytes, address: str) -> bytes:
        nonce = secrets.token_bytes(32)
        return OFFER.pack(nonce, self._key.sign(_transcript(hello, nonce, address)))

    def admits(self, hello: bytes, offer: bytes, address: str, proof: bytes) -> bool:
        transcript = _transcript(hello, OFFER.unpack(offer)[0], address)
        expected = hmac.digest(self._secrets[self.heard(hello).role], transcript, "sha256")
        return hmac.compare_digest(expected, proof)


def bearer(token: str) -> str:
    """What calls carry to say what the caller may do. It follows from the token, and opens no gate."""
    secret = _parts_of(token)[0] if token.startswith(_READ_PREFIX) else _derived(token, b"millpond full")
    return "Bearer " + hmac.digest(secret, b"millpond calls", "sha256").hex()


@lru_cache(maxsize=8)
def read_only_token(token: str) -> str:
    """The token of the same pond that may only read: it follows from the full one, and not the other way round."""
    identity = _signing_key(token).public_key().public_bytes_raw()
    secret = _derived(token, b"millpond read-only")
    return _READ_PREFIX + base64.urlsafe_b64encode(secret + identity).decode()


def _parts_of(read_token: str) -> tuple[bytes, Ed25519PublicKey]:
    try:
        both = base64.b64decode(read_token.removeprefix(_READ_PREFIX), b"-_", validate=True)
    except (binascii.Error, ValueError):
        both = b""
    if len(both) != 64:
        raise _not_a_token()
    return both[:32], Ed25519PublicKey.from_public_bytes(both[32:])


def _signing_key(token: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_derived(token, b"millpond identity"))


def _derived(token: str, purpose: bytes) -> bytes:
    return hmac.digest(token.encode(), purpose, "sha256")


def _transcript(hello: bytes, nonce: bytes, address: str) -> bytes:
    return hashlib.sha256(hello + nonce + address.encode()).digest()


def _not_a_token() -> BadOption:
    return BadOption(
        "the token is not one that a pond has made",
        hint="it is in the file `token`, or `token.read`, under the pond's root",
        option="token",
    )
