"""The options by which SGLang loads our HiCache back end: a pure function of our settings."""

from __future__ import annotations

import json
from dataclasses import asdict

from gyre.kv_migrate.page_exchange import Settings

MODULE, CLASS = "gyre.kv_migrate.hicache", "GyreStorage"


def hicache_flags(settings: Settings, page_tokens: int) -> tuple[str, ...]:
    """For `python -m sglang.launch_server`, beside `--page-size`. What is default in the settings is not said."""
    default = asdict(Settings(settings.secret_file, ""))
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
