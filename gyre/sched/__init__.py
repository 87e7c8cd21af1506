"""The scheduler's decisions, pure: what to launch, which cells train, how a cell changes its role, what is too stale.

No clock, socket or thread is in here, so the daemon, the tests and the simulator run the same code.
"""
