"""A container's own certificate: what it shows to others, where it listens by it, and how it is renewed."""

from __future__ import annotations

from typing import Any

from millpond.errors import BadMessage
from millpond.wire.authority import Bundle
from millpond.wire.base import Done, Message
from millpond.wire.connection import Handler
from millpond.wire.credentials import Credentials
from millpond.wire.keyring import ContainerKeys
from millpond.wire.passes import Certify
from millpond.wire.sockets import TLS_SCHEME, SocketDirectory
from millpond.wire.tls import TlsGate


class OwnCertificate:
    """As long as the process lives, under one name."""

    def __init__(self, keys: ContainerKeys) -> None:
        self._keys = keys
        self._gate: TlsGate | None = None
        self.credentials = _Renewed(keys)

    def listen(self, sockets: SocketDirectory) -> str:
        """Where it is reached by TLS, if it is to be: at an address that says what it is called."""
        if self._keys.bundle is None or not self._keys.host:
            return ""
        self._gate = TlsGate(self._keys.bundle.serving(), sockets, self._keys.host, 0, only=self._keys.name)
        self._gate.revoke(frozenset(self._keys.revoked))
        return f"{TLS_SCHEME}{self._gate.address}/{self._keys.name}"

    def certify(self, message: Certify) -> None:
        """Connections that are there stay, but for those of certificates that are revoked."""
        if self._gate is None:
            raise BadMessage("a container that is not reached by TLS has no certificate to renew")
        self._gate.renew(message.bundle.serving())
        self._gate.revoke(frozenset(message.revoked))
        self.credentials.renew(message.bundle)


class Certified:
    """The handler of a container's process: all but the certificate is the service's (a `Handler`)."""

    def __init__(self, service: Handler, own: OwnCertificate) -> None:
        self._service = service
        self._own = own
        self.exchange = service.exchange
        self.read = service.read

    def call(self, message: Any) -> Message:
        if isinstance(message, Certify):
            self._own.certify(message)
            return Done()
        return self._service.call(message)


class _Renewed(Credentials):
    """What the container shows to its peers."""

    def __init__(self, keys: ContainerKeys) -> None:
        super().__init__(bearer=keys.bearer, bundle=keys.bundle)

    def renew(self, bundle: Bundle) -> None:
        self._bundle = bundle
