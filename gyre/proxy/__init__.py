"""The proxy: what a harness takes for its model's API, and the only way by which its tokens reach Gyre.

A request comes in a dialect, becomes a `Conversation`, is rendered to token ids that extend what the run said before,
sampled on an engine (or several, one after another), journalled, parsed, and answered in the dialect it came in.
"""
