"""Moving bytes between peers: the KV blocks of a prefix, so that a continued request does not compute them again.

`blocks` names blocks, `transport` is the contract of a carrier, `tcp` carries over a socket, `prefix` moves one prefix
from an engine to another. A version that differs or a block that arrives damaged means recompute, never wrong KV.
"""
