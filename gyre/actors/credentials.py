"""Moved: see gyre.credentials."""

from gyre.credentials import CLIENT, Credentials, Holder

__all__ = ["CLIENT", "Credentials", "Holder"]
