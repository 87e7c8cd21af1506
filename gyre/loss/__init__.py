"""The loss of DESIGN §7: advantages within a group, weights within a run and a batch, and the token objectives.

Imported without torch; only the functions of `objectives` import it, when they are called.
"""
