"""The contract suite on real SGLang."""

from engine.contract import *  # noqa: F403
