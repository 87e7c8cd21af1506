"""Tracing and metrics: what happened in a role switch, and how the node is doing. No exporter unless configured."""
