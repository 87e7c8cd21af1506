"""Harnesses: task formats, workspaces, profiles, the sandbox that a run is confined to, launch and evaluation.

A run's processes are started and watched by a keeper of its own (`keeper`), so they outlive the process that asked for
them. Nothing here knows of actors or of the proxy: a harness is given a base URL and left alone.
"""
