"""The state store (DESIGN §4): typed records, keys, transactions, leases, watches, election and fencing.

Start with `protocol` (what a store promises) and `records` (what is kept in it); `open` gives a store for a URL.
"""
