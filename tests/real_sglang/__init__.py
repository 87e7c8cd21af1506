"""Real SGLang 0.5.23 on a CPU, in an environment of its own (bin/sglang-env). Without it these tests are skipped.

Its servers never see this folder's parent on their path: tests and SGLang have packages of the same names.
"""
