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

Tasks have tokens of their own (`task_token`), good for some minutes: they follow from a secret that is made when the
pond is opened, and have the form of a read-only token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import struct
import time
from functools import lru_cache
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from millpond.errors import BadMessage, BadOption, NotThePond
from millpond.wire.sockets import NAME_PATTERN

MAGIC = b"millpond gate 1\n"
FULL, READ, TASK = b"F", b"R", b"T"
HELLO = struct.Struct("!16s1s64s32s")
OFFER = struct.Struct("!32s64s")
PROOF_BYTES = 32
WELCOME, REFUSED, BUSY, GONE = b"W", b"R", b"B", b"G"
_READ_PREFIX, _TASK_PREFIX = "read.", "task."
_PREFIXES = {_READ_PREFIX: READ, _TASK_PREFIX: TASK}
TASK_TOKEN_S = 300.0
"""A task's token is good in its own span of this length, in the one before and in the one after."""
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
        self.role = _role_of(token)
        if self.role != FULL:
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

    def __init__(self, token: str, tasks: bytes = b"") -> None:
        self._key = _signing_key(token)
        self._tasks = tasks
        reading, _ = _parts_of(read_only_token(token))
        self._secrets = {FULL: _derived(token, b"millpond full"), READ: reading}

    def _secrets_of(self, role: bytes) -> list[bytes]:
        if role == TASK and self._tasks:
            return task_secrets(self._tasks, time.time())
        return [self._secrets[role]] if role in self._secrets else []

    def heard(self, hello: bytes) -> Hello:
        """What a client says that it is; BadMessage if it is no client."""
        magic, role, server, _ = HELLO.unpack(hello)
        name = server.rstrip(b"\0").decode("ascii", "replace")
        if magic != MAGIC or not self._secrets_of(role) or not re.match(NAME_PATTERN, name):
            raise BadMessage("a connection did not begin with a handshake of this version")
        return Hello(role, name)

    def offer(self, hello: bytes, address: str) -> bytes:
        nonce = secrets.token_bytes(32)
        return OFFER.pack(nonce, self._key.sign(_transcript(hello, nonce, address)))

    def admits(self, hello: bytes, offer: bytes, address: str, proof: bytes) -> bool:
        transcript = _transcript(hello, OFFER.unpack(offer)[0], address)
        return any(
            hmac.compare_digest(hmac.digest(secret, transcript, "sha256"), proof)
            for secret in self._secrets_of(self.heard(hello).role)
        )


def bearer(token: str) -> str:
    """What calls carry to say what the caller may do. It follows from the token, and opens no gate."""
    return _bearer(_derived(token, b"millpond full") if _role_of(token) == FULL else _parts_of(token)[0])


@lru_cache(maxsize=8)
def read_only_token(token: str) -> str:
    """The token of the same pond that may only read: it follows from the full one, and not the other way round."""
    identity = _signing_key(token).public_key().public_bytes_raw()
    secret = _derived(token, b"millpond read-only")
    return _READ_PREFIX + base64.urlsafe_b64encode(secret + identity).decode()


def task_token(token: str, tasks: bytes, now: float) -> str:
    """The token of tasks at that time, by the pond's secret for them: it follows from no other token."""
    identity = _signing_key(token).public_key().public_bytes_raw()
    return _TASK_PREFIX + base64.urlsafe_b64encode(task_secrets(tasks, now)[0] + identity).decode()


def task_secrets(tasks: bytes, now: float) -> list[bytes]:
    """Those that are good at that time, the present one first. Clocks of machines differ: the next is good already."""
    span = int(now // TASK_TOKEN_S)
    return [_task_secret(tasks, near) for near in (span, span - 1, span + 1)]


def task_bearers(tasks: bytes, now: float) -> list[str]:
    return [_bearer(secret) for secret in task_secrets(tasks, now)]


@lru_cache(maxsize=16)
def _task_secret(tasks: bytes, span: int) -> bytes:
    return hmac.digest(tasks, span.to_bytes(8, "big"), "sha256")


@lru_cache(maxsize=64)
def _bearer(secret: bytes) -> str:
    return "Bearer " + hmac.digest(secret, b"millpond calls", "sha256").hex()


def _role_of(token: str) -> bytes:
    return next((role for prefix, role in _PREFIXES.items() if token.startswith(prefix)), FULL)


def _parts_of(token: str) -> tuple[bytes, Ed25519PublicKey]:
    """Of a token that is not the full one."""
    try:
        both = base64.b64decode(token.partition(".")[2], b"-_", validate=True)
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
