"""The contract suite on the local engine, for each model family."""

from .contract import *  # noqa: F403
