"""What a run did, as tokens: the tree of its calls, the lineages that are trained, how it ended, the journal format.

Everything here is pure: no clock, no socket, no file, no torch. The gateway feeds it calls and bytes; the core reads
what comes out.
"""
