"""A store URL that names an etcd cluster, taken apart.

    etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/prod?ca=ca.pem&cert=node1.pem&key=node1.key&user=gyre

The path is the cluster's name: many can live on one etcd. With `ca` the connection is encrypted; `cert` and `key` prove
who we are. A user's password is in $GYRE_ETCD_PASSWORD or in the file that `password_file` names, never in the URL,
which stands in process lists and logs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from gyre.errors import BadInput

PASSWORD_VARIABLE = "GYRE_ETCD_PASSWORD"
EXAMPLE = "etcd://host:2379,host:2379/cluster?ca=ca.pem&cert=node.pem&key=node.key&user=name"
_OPTIONS = ("ca", "cert", "key", "user", "password_file")
_ENDPOINT = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class EtcdAddress:
    endpoints: tuple[str, ...]
    """host:port each."""
    cluster: str
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: Path | None = None

    @staticmethod
    def parse(url: str, environment: Mapping[str, str] = os.environ) -> EtcdAddress:
        """Raises BadInput, which repeats no password, for a URL that is none."""
        shown = _without_password(url)
        parts = urlsplit(url)
        if parts.scheme != "etcd" or not parts.netloc:
            raise BadInput("store url", shown, f"give {EXAMPLE}")
        if "@" in parts.netloc:
            raise BadInput("store url", shown, f"the user goes into ?user=, the password into ${PASSWORD_VARIABLE}")
        endpoints = tuple(parts.netloc.split(","))
        for endpoint in endpoints:
            found = _ENDPOINT.fullmatch(endpoint)
            if found is None or not 0 < int(found["port"]) < 65536:
                raise BadInput("store url's endpoint", endpoint, "give host:port, several with commas between")
        cluster = unquote(parts.path.removeprefix("/"))
        if _CLUSTER.fullmatch(cluster) is None:
            raise BadInput("store url's cluster", cluster, f"give its name after the endpoints: {EXAMPLE}")
        options = _options(parts.query, shown)
        files = {name: Path(options[name]) for name in ("ca", "cert", "key") if name in options}
        if ("cert" in files) != ("key" in files) or ("cert" in files and "ca" not in files):
            raise BadInput("store url", shown, "cert and key go together, and with ca")
        user, password = options.get("user", ""), _password(options, environment)
        kept_in = Path(options["password_file"]) if "password_file" in options else None
        return EtcdAddress(endpoints, cluster, **files, user=user, password=password, password_file=kept_in)

    def password_now(self) -> str:
        """As its file has it now, when it is kept in one. Raises BadInput for one that cannot be read."""
        return self.password if self.password_file is None else _password_in(self.password_file)

    def read(self, path: Path | None) -> bytes | None:
        """The content of one of its files."""
        if path is None:
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise BadInput("store url's file", str(path), f"it must be readable ({error.strerror})") from error


def _options(query: str, shown: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise BadInput("store url", shown, f"options are name=value with & between ({error})") from error
    options: dict[str, str] = {}
    for name, value in pairs:
        if name == "password":
            raise BadInput("store url", shown, f"the password goes into ${PASSWORD_VARIABLE} or password_file=")
        if name not in _OPTIONS or name in options or not value:
            raise BadInput("store url's option", f"{name}={value}", f"each once of {', '.join(_OPTIONS)}, with a value")
        options[name] = value
    return options


def _password(options: Mapping[str, str], environment: Mapping[str, str]) -> str:
    if (user := options.get("user", "")) == "":
        if "password_file" in options:
            raise BadInput("store url's option", "password_file", "it goes with user=")
        return ""
    if (path := options.get("password_file")) is not None:
        return _password_in(Path(path))
    if not (password := environment.get(PASSWORD_VARIABLE, "")):
        raise BadInput("store url's user", user, f"set ${PASSWORD_VARIABLE}, or name a file with password_file=")
    return password


def _password_in(path: Path) -> str:
    try:
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            "store url's password_file", str(path), f"it must be a text file that can be read ({error})"
        ) from error
    if not password:
        raise BadInput("store url's password_file", str(path), "it must hold the password, and is empty")
    return password


def _without_password(url: str) -> str:
    hidden = re.sub(r"//([^/@:]*):[^/@]*@", r"//\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", hidden)
