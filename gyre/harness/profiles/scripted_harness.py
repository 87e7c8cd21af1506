"""A harness that does what a script says, over the OpenAI Chat dialect. A program, run by path; standard library only.

    scripted_harness.py BASE_URL SCRIPT RESULT INSTRUCTION

The script is JSON: a list of steps, or `{"ignore_sigterm": bool, "max_tokens": n, "steps": […]}`. A step is one of

    {"ask": text}                 one user turn ({task}: the instruction), one call; the answer's fenced command is run
    {"work": text, "turns": n}    ask, then answer with each command's output, until a turn has no command, or n turns
    {"run": command}              run a shell command in the workspace
    {"spawn": command}            start one in a session of its own, and leave it there
    {"sleep": seconds}            {"forever": true}
    {"submit": true}              say that the work is done
    {"exit": code}                {"kill": signal number}

Calls are repeated, with the same body, on a lost connection and on 429 and 5xx answers, for two minutes.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

RETRY_FOR_S = 120.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
ANSWER_S = 600.0
COMMAND_S = 30.0
OUTPUT_CHARACTERS = 400
COMMAND = re.compile(r"```[a-z]*\n(.*?)\n```", re.DOTALL)


class Harness:
    def __init__(self, base_url: str, script: dict[str, Any], result: str, instruction: str) -> None:
        self._url = f"{base_url}/v1/chat/completions"
        self._steps = script["steps"]
        self._max_tokens = script.get("max_tokens", 32)
        self._result = result
        self._instruction = instruction
        self._messages: list[dict[str, str]] = []
        self._answers: list[str] = []
        self._submitted = False

    def work(self) -> int:
        for step in self._steps:
            kind, value = next(iter(step.items()))
            if kind == "exit":
                self._report()
                return int(value)
            self._take(kind, value, step)
        self._report()
        return 0

    def _take(self, kind: str, value: Any, step: dict[str, Any]) -> None:
        if kind == "ask":
            self._turn(value)
        elif kind == "work":
            output = self._turn(value)
            for _ in range(step["turns"] - 1):
                if output is None:
                    break
                output = self._turn(output)
        elif kind == "run":
            print(run_command(value), flush=True)
        elif kind == "spawn":
            subprocess.Popen(value, shell=True, start_new_session=True, stdin=subprocess.DEVNULL)
        elif kind == "sleep":
            time.sleep(value)
        elif kind == "forever":
            while True:
                time.sleep(3600)
        elif kind == "submit":
            self._submitted = True
        elif kind == "kill":
            os.kill(os.getpid(), value)
        else:
            raise SystemExit(f"unknown step {kind!r}")

    def _turn(self, text: str) -> str | None:
        """One user turn; the output of the command that the answer holds, or None."""
        self._messages.append({"role": "user", "content": text.replace("{task}", self._instruction)})
        answer = self._call({"model": "policy", "messages": self._messages, "max_tokens": self._max_tokens})
        self._messages.append({"role": "assistant", "content": answer})
        self._answers.append(answer)
        found = COMMAND.search(answer)
        return None if found is None else run_command(found.group(1))

    def _call(self, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": "Bearer unused"}
        )
        until_s, pause_s = time.monotonic() + RETRY_FOR_S, FIRST_PAUSE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                    return str(json.load(response)["choices"][0]["message"]["content"] or "")
            except urllib.error.HTTPError as error:
                if error.code != 429 and error.code < 500:
                    raise SystemExit(f"the call was refused: {error.code} {error.read(300).decode()}") from error
                fault: Exception = error
            except (OSError, http.client.HTTPException, ValueError) as error:
                fault = error
            if time.monotonic() > until_s:
                raise SystemExit(f"no answer for {RETRY_FOR_S:g} s: {fault}")
            print(f"again in {pause_s:g} s: {fault}", flush=True)
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _report(self) -> None:
        with open(self._result, "w", encoding="utf-8") as file:
            json.dump({"submitted": self._submitted, "answers": self._answers}, file)


def run_command(command: str) -> str:
    """What the command printed, and its exit code first."""
    try:
        done = subprocess.run(
            command,
            shell=True,
            capture_output=True,
            timeout=COMMAND_S,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"[timeout after {COMMAND_S:g} s]"
    return f"[{done.returncode}]\n{(done.stdout + done.stderr)[:OUTPUT_CHARACTERS].rstrip()}"


def main() -> int:
    base_url, script_path, result, instruction = sys.argv[1:]
    with open(script_path, encoding="utf-8") as file:
        script = json.load(file)
    if isinstance(script, list):
        script = {"steps": script}
    if script.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return Harness(base_url, script, result, instruction).work()


if __name__ == "__main__":
    sys.exit(main())
