"""The scripted harness: a small program of ours that does what a script says. For tests of everything around a harness.

The profile's configuration file is the script; scripted_harness.py describes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gyre.harness.profiles import Launch, LaunchContext, Profile
from gyre.harness.workspace import RunFolder

_PROGRAM = Path(__file__).with_name("scripted_harness.py")


def result(folder: RunFolder) -> Path:
    """What the harness writes when it ends by itself: `{"submitted", "answers"}`."""
    return folder.home / "result.json"


def launch(context: LaunchContext) -> Launch:
    program = (sys.executable, "-I", "-S", str(_PROGRAM))
    arguments = (context.base_url, str(context.settings.config), str(result(context.folder)), context.instruction)
    return Launch(program, arguments, context.environment())


def submitted(folder: RunFolder) -> bool:
    try:
        return bool(json.loads(result(folder).read_text(encoding="utf-8"))["submitted"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


PROFILE = Profile(name="scripted", launch=launch, submitted=submitted, config_required=True)
