"""Sampling engines behind one client.

`client` speaks the subset of SGLang's HTTP surface that Gyre needs; `local` is a small CPU engine that serves that
subset. Whoever talks to an engine (the gateway, a cell) uses the client and cannot tell which one answers.
"""
