"""Any other harness, by its command line. A job file says how it is started:

    [harness]
    profile = "command"
    command = ["some-harness", "--yes", "--prompt", "{instruction}"]
    env = { OPENAI_BASE_URL = "{base_url}/v1", OPENAI_API_KEY = "unused" }

`{base_url}`, `{instruction}`, `{workspace}` and `{home}` stand for the run's own, `{{` and `}}` for a brace. Its calls are told apart by the marks
of every harness that was looked at. Whether it says that its work is done is not known.
"""

from __future__ import annotations

import re

from gyre.config import PLACEHOLDER
from gyre.harness.profiles import Launch, LaunchContext, Profile
from gyre.harness.workspace import RunFolder


def launch(context: LaunchContext) -> Launch:
    values = {
        "base_url": context.base_url,
        "instruction": context.instruction,
        "workspace": str(context.folder.workspace),
        "home": str(context.folder.home),
    }
    braces = {"{{": "{", "}}": "}"}

    def filled(text: str) -> str:
        def value(found: re.Match[str]) -> str:
            return braces[found[0]] if found[1] is None else values[found[1]]

        return PLACEHOLDER.sub(value, text)

    program, *arguments = map(filled, context.settings.command)
    env = {name: filled(text) for name, text in context.settings.env.items()}
    return Launch((program,), tuple(arguments), {**context.environment(), **env})


def submitted(folder: RunFolder) -> None:
    return None


PROFILE = Profile(name="command", launch=launch, submitted=submitted)
