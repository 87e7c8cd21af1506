"""Sampling engines behind one client.

`client` speaks the subset of SGLang's HTTP surface that Gyre needs; `local` is a small CPU engine that serves that
subset; `sglang` is how SGLang itself is started, and what its owner asks it first. Whoever talks to an engine (the
gateway, a cell) uses the client and cannot tell which one answers.
"""
