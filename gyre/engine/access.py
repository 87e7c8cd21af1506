"""What an engine wants to be shown by its clients: a key made of the job's secret, which itself never travels."""

from __future__ import annotations

from gyre.jobdir import key_for


def http_key(secret: str) -> str:
    """The `Authorization: Bearer` key of the engines whose `--secret-file` holds `secret`."""
    return key_for(secret, "engine http")
