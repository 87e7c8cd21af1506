"""A certificate authority for a cluster whose people have none: `gyrectl pki`.

    init(folder, "lab", 3650)                     # ca.pem, ca.key
    issue(folder, "node-a", Kind.NODE, 365, ("10.0.0.1",))
    issue(folder, "ada", Kind.CLIENT, 90)         # for a person, or a program of theirs

A certificate's common name is the node's id (or the person's name), its organisational unit says which of the two it is;
a client's cannot be used to serve. The addresses in a node's are for other programs (etcd) that check them. Keys are
P-256, in files of mode 0600. Nothing that exists is overwritten.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gyre.errors import BadInput, Refused

CA_DAYS = 3650
NODE_DAYS = 365
_BEFORE = timedelta(days=1)
"""Valid from so long before now on, for machines whose clock is behind, by a time zone say."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


class Kind(Enum):
    CA = "ca"
    NODE = "node"
    CLIENT = "client"


@dataclass(frozen=True)
class Certificate:
    """What is worth knowing of one."""

    path: Path
    name: str
    kind: Kind
    issuer: str
    hosts: tuple[str, ...]
    not_before: datetime
    not_after: datetime
    fingerprint: str

    def left(self, now: datetime) -> timedelta:
        """Until it expires; negative when it has."""
        return self.not_after - now


def init(folder: Path, cluster: str, days: int, now: datetime | None = None) -> Certificate:
    """Make the authority: `ca.pem` and `ca.key` in `folder`. Raises BadInput, or Refused when it is there already."""
    _check_name("cluster", cluster)
    begin, end = _validity(days, now)
    certificate_path, key_path = _paths(folder, "ca")
    _check_free(certificate_path, key_path)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(cluster, Kind.CA)
    certificate = (
        _builder(subject, subject, key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder, key_path, _pem(key), 0o600)
    _write(folder, certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return read(certificate_path)


def issue(
    folder: Path,
    name: str,
    kind: Kind,
    days: int,
    hosts: Sequence[str] = (),
    *,
    renew: bool = False,
    now: datetime | None = None,
) -> Certificate:
    """Make `NAME.pem` and `NAME.key`, signed by the authority in `folder`.

    With `renew` the certificate is replaced, in one move; its key, kind and (when none are given) hosts stay. Raises BadInput or Refused.
    """
    _check_name("name", name)
    if name == "ca":
        raise BadInput("name", name, "it is the authority's")
    begin, end = _validity(days, now)
    ca, ca_key = _authority(folder)
    if end > ca.not_valid_after_utc:
        left = ca.not_valid_after_utc - begin - _BEFORE
        raise BadInput("days", days, f"the authority itself ends in {left.days} days")
    certificate_path, key_path = _paths(folder, name)
    if renew:
        old = read(certificate_path)
        key, kind, hosts = _read_key(key_path), old.kind, hosts or old.hosts
    else:
        _check_free(certificate_path, key_path)
        key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if kind is Kind.NODE:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    others = [_general_name(host) for host in hosts if host != name]
    certificate = (
        _builder(_subject(name, kind), ca.subject, key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name), *others]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    if renew:
        fresh = certificate_path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        _write(folder, fresh, pem, 0o644)
        fresh.replace(certificate_path)
    else:
        _write(folder, key_path, _pem(key), 0o600)
        _write(folder, certificate_path, pem, 0o644)
    return read(certificate_path)


def read(path: Path) -> Certificate:
    """What the certificate at `path` says. Raises BadInput."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise BadInput("certificate", str(path), f"it must be a file that can be read ({error.strerror})") from error
    except ValueError as error:
        raise BadInput("certificate", str(path), "it must be a PEM certificate") from error
    unit = _first(found.subject, NameOID.ORGANIZATIONAL_UNIT_NAME)
    return Certificate(
        path,
        _first(found.subject, NameOID.COMMON_NAME),
        Kind(unit) if unit in {kind.value for kind in Kind} else Kind.NODE,
        _first(found.issuer, NameOID.COMMON_NAME),
        _hosts(found),
        found.not_valid_before_utc,
        found.not_valid_after_utc,
        found.fingerprint(hashes.SHA256()).hex(),
    )


# ------------------------------------------------------------------------------------------------ parts


def _check_name(field: str, name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise BadInput(field, name, "lower-case letters, digits, `-` and `.` are allowed, 1 to 63 of them")


def _validity(days: int, now: datetime | None) -> tuple[datetime, datetime]:
    if not 1 <= days <= 36500:
        raise BadInput("days", days, "1 to 36500 are allowed")
    begin = (now or datetime.now(UTC)) - _BEFORE
    return begin, begin + _BEFORE + timedelta(days=days)


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"


def _check_free(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise Refused(f"{path} exists and is not overwritten")


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_path, key_path = _paths(folder, "ca")
    if not certificate_path.exists():
        raise BadInput("--dir", str(folder), "it must hold ca.pem and ca.key; `gyrectl pki init` makes them")
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput("certificate", str(certificate_path), "it must be a PEM certificate") from error
    return certificate, _read_key(key_path)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise BadInput("key", str(path), f"it must be a PEM key without a password ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput("key", str(path), "it must be an elliptic-curve key, as `gyrectl pki` makes them")
    return key


def _subject(name: str, kind: Kind) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, kind.value),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
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


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        _check_name("host", host)
        return x509.DNSName(host)


def _hosts(found: x509.Certificate) -> tuple[str, ...]:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def _first(name: x509.Name, oid: x509.ObjectIdentifier) -> str:
    values = name.get_attributes_for_oid(oid)
    return str(values[0].value) if values else ""


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(folder: Path, path: Path, data: bytes, mode: int) -> None:
    """A new file with that mode from the start."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise Refused(f"{path} exists and is not overwritten") from None
    except OSError as error:
        raise BadInput("--dir", str(folder), f"it must be a folder that can be written ({error.strerror})") from error
