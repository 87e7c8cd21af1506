"""What changes in a system prompt without changing what it says: dates, times, commit and session ids, git's status.

Such a token near the start of a prompt would make every thread of a run, and every resumed thread, a branch of its
own. So a system prompt is recognised by its steady part (`steady`), and rendered as it was first seen in the run; a
billing header is left out altogether (`without_headers`).
"""

from __future__ import annotations

import re

_HEADER = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE)
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Sept|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_VOLATILE = re.compile(
    "|".join(
        (
            r"^gitStatus:(?:.|\n)*?(?=\n\n#|\Z)",
            r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
            r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?)?",
            r"\b\d{1,2}/\d{1,2}/\d{4}\b",
            rf"\b(?:{_DAY},? )?{_MONTH} \d{{1,2}}(?:,? \d{{4}})?\b",
            rf"\b(?:{_DAY},? )?\d{{1,2}} {_MONTH} \d{{4}}\b",
            r"\b\d{1,2}:\d\d(?::\d\d)?(?: ?[AP]M)?\b",
            r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b",
        )
    ),
    re.MULTILINE,
)


def without_headers(text: str) -> str:
    """The system prompt without lines that are addressed to the server and not to the model."""
    return _HEADER.sub("", text)


def steady(text: str) -> str:
    """The system prompt with all that is volatile in it blotted out."""
    return _VOLATILE.sub("\N{REPLACEMENT CHARACTER}", without_headers(text))
