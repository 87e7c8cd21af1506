"""The APIs that harnesses speak, each as pure functions: a body to a `Conversation`, an answer to a body or a stream.

A dialect knows no session, no socket and no model. Its faults are in its own form, as its official client reads them.
"""
