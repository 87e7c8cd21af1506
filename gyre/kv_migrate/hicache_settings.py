"""What our HiCache back end is told, and how SGLang is told to load it. Nothing heavy is imported: gyred makes the options."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, cast

from gyre.errors import BadInput
from gyre.kv_migrate.choice import AUTO, WANTED

MODULE, CLASS = "gyre.kv_migrate.hicache", "GyreStorage"


@dataclass(frozen=True)
class HicacheSettings:
    """Our part of SGLang's `--hicache-storage-backend-extra-config`."""

    secret_file: str
    """The job's secret: by it peers know each other, and its key lets the gateway give orders."""
    orders: str
    """HOST:PORT where the first rank serves the orders, each further rank one port on. Peers read pages at the same host,
    on ports that are free."""
    model: str = ""
    """Which weights these are, by whatever name the job has for them; pages of others are refused."""
    certificates: tuple[str, ...] = ()
    """CA, CERTIFICATE and KEY of this node: by them peers on other machines know each other."""
    transport: str = AUTO
    """What carries the pages: `auto`, or a kind of transport."""
    keep_bytes: int = 1 << 30
    """Of pages that have come and are not asked for yet."""
    silence_s: float = 0.45
    """A source from which nothing comes for so long is given up."""

    @classmethod
    def read(cls, config: dict[str, Any]) -> HicacheSettings:
        """Raises BadInput. What belongs to SGLang is passed over."""
        _need(config, "secret_file", isinstance(config.get("secret_file"), str), "a path is expected")
        host, _, port = str(config.get("orders")).rpartition(":")
        _need(config, "orders", bool(host) and port.isdecimal(), "HOST:PORT is expected")
        transport = config.get("transport", cls.transport)
        _need(config, "transport", transport in WANTED, f"one of {', '.join(WANTED)} is expected")
        certificates = config.get("certificates", [])
        named = isinstance(certificates, list) and len(cast("list[Any]", certificates)) in (0, 3)
        _need(config, "certificates", named, "CA, CERTIFICATE and KEY are expected")
        keep_bytes, silence_s = config.get("keep_bytes", cls.keep_bytes), config.get("silence_s", cls.silence_s)
        _need(config, "keep_bytes", type(keep_bytes) is int and keep_bytes > 0, "bytes, above 0")
        _need(config, "silence_s", type(silence_s) in (int, float) and silence_s > 0, "seconds, above 0")
        return cls(
            secret_file=config["secret_file"],
            orders=config["orders"],
            model=str(config.get("model", "")),
            certificates=tuple(map(str, cast("list[Any]", certificates))),
            transport=transport,
            keep_bytes=keep_bytes,
            silence_s=float(silence_s),
        )


def hicache_flags(settings: HicacheSettings, page_tokens: int) -> tuple[str, ...]:
    """For `python -m sglang.launch_server`, beside `--page-size`. What is default in the settings is not said."""
    default = asdict(HicacheSettings(settings.secret_file, ""))
    ours = {key: value for key, value in asdict(settings).items() if key == "secret_file" or value != default[key]}
    config = {
        "backend_name": "gyre",
        "module_path": MODULE,
        "class_name": CLASS,
        "interface_v1": 1,
        "prefetch_threshold": page_tokens,  # less than a page cannot be fetched
        **ours,
    }
    return (
        "--enable-hierarchical-cache",
        *("--hicache-write-policy", "write_through"),
        *("--hicache-mem-layout", "page_first_direct"),
        *("--hicache-io-backend", "direct"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
    )


def _need(config: dict[str, Any], key: str, right: bool, allowed: str) -> None:
    if not right:
        raise BadInput(f"hicache extra config: {key}", config.get(key), allowed)
