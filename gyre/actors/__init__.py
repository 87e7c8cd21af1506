"""The actor runtime (`runtime`, `remote`), the messages between actors (`messages`), and the cluster's actors on top.

An actor is the thin shell around a pure core: it is fed events, and carries out the actions that the core returns.
"""
