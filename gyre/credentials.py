"""The certificates by which the processes of a cluster know each other (`gyrectl pki` makes them).

The files are read anew for each connection, so a renewed certificate is used from the next one on.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gyre.errors import BadInput

CLIENT = "client"
"""The organisational unit of a person's certificate; a node's is `node`."""


@dataclass(frozen=True)
class Credentials:
    """Whose certificates are accepted (`ca`, one or more authorities), and our own."""

    ca: Path
    certificate: Path
    key: Path

    def context(self, *, server: bool) -> ssl.SSLContext:
        """For one side of a connection; both sides must show a certificate. Raises BadInput, naming the file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a certificate names a node, wherever that is reached
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # nobody resumes a session
        for path in (self.ca, self.certificate, self.key):
            if not path.is_file():
                raise BadInput(
                    "certificates", str(path), "it must be a file that can be read; `gyrectl pki` makes them"
                )
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise BadInput("certificates", str(self.ca), f"it must be a PEM certificate ({_said(error)})") from error
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(
                "certificates", str(self.certificate), f"it must be PEM and belong to {self.key} ({_said(error)})"
            ) from error
        return context


@dataclass(frozen=True)
class Holder:
    """Whom a certificate names."""

    name: str
    client: bool

    @staticmethod
    def of(certificate: dict[str, object]) -> Holder:
        """From what ssl tells of the other side's certificate."""
        subject = cast(tuple[tuple[tuple[str, str], ...], ...], certificate.get("subject", ()))
        parts = {key: value for pairs in subject for key, value in pairs}
        return Holder(parts.get("commonName", ""), parts.get("organizationalUnitName", "") == CLIENT)


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate in it").lower().replace("_", " ")
    return str(error)
