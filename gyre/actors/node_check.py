"""What a node's file names, looked at before anything is begun with it: the folders, the store's URL, the certificates.

`gyrectl config check` and gyred ask the same; of a person's file (gyre.cli.cluster_file) too, what both kinds name. Certificates are shown to themselves, as other nodes will see them. One
that has expired is no fault of the file: a renewed one is used from the next connection on, and `gyrectl doctor` tells.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from gyre.actors.node_config import NodeConfig
from gyre.actors.tls import Tls
from gyre.config import FileError
from gyre.credentials import Credentials, Holder
from gyre.errors import BadInput
from gyre.store.etcd.address import EtcdAddress
from gyre.store.open import sqlite_path

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which ssl has no name."""
_FLIGHTS = 4
"""Of a handshake of TLS 1.3, and one to spare."""


def load_node(path: Path) -> NodeConfig:
    """The node in the file at `path`, fit to be begun. Raises FileError with one line a fault."""
    config = NodeConfig.load(path)
    if faults := check_node(config):
        raise FileError(path, faults)
    return config


def check_node(config: NodeConfig) -> list[str]:
    """Every fault of a node's file whose shape is right."""
    faults: list[str] = []
    if not config.base.is_dir():
        faults.append(fault("node.base", config.base, "it must be a folder: relative paths of a job file start there"))
    if config.job.root.exists() and not config.job.root.is_dir():
        faults.append(fault("node.dir", config.job.root, "it must be a folder"))
    faults += check_store("node.store", config.store)
    if config.membership is not None:
        faults += check_credentials("node", config.membership.credentials, config.name)
    return faults


def check_credentials(section: str, held: Credentials, node: str | None) -> list[str]:
    """Every fault of the files, and of whom the certificate names: the `node`, or a person where that is None."""
    files = {"ca": held.ca, "certificate": held.certificate, "key": held.key}
    return _files(f"{section}.", files) or _shown_to_itself(section, node, held)


def check_store(key: str, url: str) -> list[str]:
    """Nothing is opened, and nobody asked. Relative paths in a URL start where the program is started."""
    try:
        if not url.startswith("etcd:"):
            sqlite_path(url)
            return []
        address = EtcdAddress.parse(url)
    except BadInput as error:
        return [f"{key}: {error}"]
    named = {"ca": address.ca, "cert": address.cert, "key": address.key}
    return _files(f"{key}'s ", {name: path.absolute() for name, path in named.items() if path is not None})


def _files(whose: str, files: dict[str, Path]) -> list[str]:
    """Whether there are such files, the authority is one, and the key is the certificate's."""
    lacking = [
        fault(whose + key, path, "it must be a file that is there") for key, path in files.items() if not path.is_file()
    ]
    if lacking:
        return lacking
    faults: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if (ca := files.get("ca")) is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:  # as every ssl.SSLError is one
            faults.append(fault(whose + "ca", ca, f"it must be a PEM certificate ({_reason(error)})"))
        else:
            if not context.cert_store_stats()["x509_ca"]:
                faults.append(
                    fault(whose + "ca", ca, "it must be an authority's certificate, as `gyrectl pki init` makes")
                )
    if "key" in files:
        name, path, key = next((name, path, files["key"]) for name, path in files.items() if name.startswith("cert"))
        try:
            context.load_cert_chain(path, key)
        except OSError as error:
            faults.append(fault(whose + name, path, f"it must be PEM and belong to the key {key} ({_reason(error)})"))
    return faults


def _shown_to_itself(section: str, node: str | None, held: Credentials) -> list[str]:
    """Whether others who trust the same authority will take the certificate for this node's, or for a person's."""
    contexts = [held.context(server=server) for server in (True, False)]
    for context in contexts:
        context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    if node is None:
        contexts[1].verify_mode = ssl.CERT_NONE  # a person's cannot serve, and only the server's look at it counts
    server, client = Tls(contexts[0], server=True), Tls(contexts[1], server=False)
    try:
        for _ in range(_FLIGHTS):
            client.greet()
            server.feed(client.out())
            server.greet()
            client.feed(server.out())
    except ssl.SSLError as error:
        whose = "a person's" if node is None else "a node's"
        return [
            fault(
                f"{section}.certificate",
                held.certificate,
                f"it must be {whose}, and signed by {held.ca} ({_reason(error)})",
            )
        ]
    holder = Holder.of((server if node is None else client).peer_certificate)
    if node is None and not holder.client:
        made = f"it names the node {holder.name!r}; `gyrectl pki issue NAME --client` makes a person's"
        return [fault(f"{section}.certificate", held.certificate, made)]
    if node is not None and (holder.client or holder.name != node):
        kind = "a person's" if holder.client else f"{holder.name!r}"
        others = f"it names {kind}, and node.name is {node!r}: others refuse it"
        return [fault(f"{section}.certificate", held.certificate, others)]
    return []


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate in it").lower().replace("_", " ")
    return error.strerror or str(error)


def fault(key: str, path: Path, allowed: str) -> str:
    return str(BadInput(key, str(path), allowed))
