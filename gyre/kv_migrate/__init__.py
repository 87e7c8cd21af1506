"""Moving bytes between peers: the KV blocks of a prefix, so that a continued request does not compute them again.

`transport` is the contract of a carrier, `tcp` and `mooncake` are the two there are, `choice` says which of them it is.
`blocks` names blocks, `prefix` moves one prefix from an engine to another. Below them: `serving` and `asking` are the two
ends of a conversation about a transfer, `leases` says how long a source holds what, `spans` what has yet to come, `pacing`
how quickly that may be fetched which no request waits for, `silence` when a source is given up.
`hicache` is the same for SGLang, which loads it: `page_exchange` takes the orders, `host_pages` has the pages. A
version that differs or a block that arrives damaged means recompute, never wrong KV.
"""
