# The five things one does.

quickstart:
    bin/quickstart

test *args:
    bin/test {{args}}

lint:
    .venv/bin/ruff format . && .venv/bin/ruff check --fix . && .venv/bin/pyright

bench *names:
    bin/bench {{names}}

ci:
    bash .ci/run
