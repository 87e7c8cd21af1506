"""`gyrectl pki …`: a certificate authority for people who have none (gyre.pki)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from gyre.errors import BadInput, GyreError, Unavailable

if TYPE_CHECKING:
    from gyre.pki import Certificate

T = TypeVar("T")

pki_app = typer.Typer(help="Make and show the cluster's certificates.", no_args_is_help=True)

Dir = Annotated[Path, typer.Option("--dir", help="The folder with ca.pem and ca.key, and what they sign.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PKI = Path("pki")


@pki_app.command()
def init(
    cluster: Annotated[str, typer.Option(help="The cluster's name, in the authority's certificate.")] = "gyre",
    days: Annotated[int, typer.Option(help="How long the authority is valid.")] = 3650,
    folder: Dir = PKI,
    as_json: AsJson = False,
) -> None:
    """Make a certificate authority: ca.pem, which every node gets, and ca.key, which none does.

    gyrectl pki init --cluster lab
    """
    from_pki = _guarded(lambda: _pki().init(folder, cluster, days))
    _print([from_pki], as_json=as_json)


@pki_app.command()
def issue(
    name: Annotated[str, typer.Argument(help="The node's id; with --client, the person's name.", show_default=False)],
    host: Annotated[list[str] | None, typer.Option(help="A name or address that the node is reached at.")] = None,
    client: Annotated[
        bool,
        typer.Option(
            "--client",
            help="For a person, whose gyrectl asks nodes over their ports (gyrectl.toml); it cannot serve.",
        ),
    ] = False,
    days: Annotated[int, typer.Option(help="How long it is valid.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the certificate; the key stays.")] = False,
    folder: Dir = PKI,
    as_json: AsJson = False,
) -> None:
    """Issue a certificate: NAME.pem and NAME.key. A running gyred takes a renewed one at its next connection.

    gyrectl pki issue node-a --host 10.0.0.1
    gyrectl pki issue ada --client --days 90
    gyrectl pki issue node-a --renew
    """

    def work() -> Certificate:
        pki = _pki()
        return pki.issue(folder, name, pki.Kind.CLIENT if client else pki.Kind.NODE, days, host or (), renew=renew)

    _print([_guarded(work)], as_json=as_json)


@pki_app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A certificate, or a folder of them.")] = PKI,
    as_json: AsJson = False,
) -> None:
    """Show whom certificates name and when they expire. Exit code 1 when one has expired.

    gyrectl pki show pki/node-a.pem
    """

    def work() -> list[Certificate]:
        found = sorted(path.glob("*.pem")) if path.is_dir() else [path]
        if not found:
            raise BadInput("path", str(path), "it must hold certificates (*.pem)")
        return [_pki().read(each) for each in found]

    certificates = _guarded(work)
    _print(certificates, as_json=as_json)
    if any(certificate.left(datetime.now(UTC)).total_seconds() <= 0 for certificate in certificates):
        raise typer.Exit(1)


def _pki() -> Any:
    try:
        from gyre import pki
    except ImportError:
        raise Unavailable("certificates need the package cryptography: pip install 'gyre[cluster]'") from None
    return pki


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except GyreError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(str(error), style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, BadInput) else 1) from error


def _print(certificates: list[Certificate], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps([_plain(certificate) for certificate in certificates]) + "\n")
        return
    now = datetime.now(UTC)
    console = Console(highlight=False, soft_wrap=True)
    for each in certificates:
        left = each.left(now)
        when = f"expires {each.not_after:%Y-%m-%d %H:%M} UTC, in {left.days} days"
        if left.total_seconds() <= 0:
            mend = "init" if each.kind.value == "ca" else f"issue {each.name} --renew"
            when = f"EXPIRED {each.not_after:%Y-%m-%d %H:%M} UTC; `gyrectl pki {mend}` makes a new one"
        hosts = f" ({', '.join(each.hosts)})" if each.hosts else ""
        console.print(f"{each.path}: {each.kind.value} {each.name}{hosts}, by {each.issuer}, {when}", markup=False)


def _plain(certificate: Certificate) -> dict[str, object]:
    return {
        "path": str(certificate.path),
        "name": certificate.name,
        "kind": certificate.kind.value,
        "issuer": certificate.issuer,
        "hosts": list(certificate.hosts),
        "not_before": certificate.not_before.isoformat(),
        "not_after": certificate.not_after.isoformat(),
        "fingerprint_sha256": certificate.fingerprint,
    }
