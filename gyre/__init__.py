"""Gyre: elastic online reinforcement learning for agents that work for hours in unmodified harnesses."""

__version__ = "0.1.0"
