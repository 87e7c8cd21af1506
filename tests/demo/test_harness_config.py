"""The harness's configuration says to the policy what the demonstrations said to it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jinja2 import StrictUndefined, Template

import gyre.demo
from gyre.demo.demonstrations import COMMANDS, SUBMIT, SYSTEM_PROMPT, fenced, observation
from gyre.demo.vocabulary import build_tokenizer

CONFIG = yaml.safe_load((Path(gyre.demo.__file__).parent / "mini_chores.yaml").read_text())


def said_about(returncode: int, output: str) -> str:
    template = Template(CONFIG["model"]["observation_template"], undefined=StrictUndefined)
    return template.render(output=SimpleNamespace(returncode=returncode, output=output, exception_info=""))


@pytest.mark.parametrize("output", ["", "\n", "6\n", "write plum in capitals to fig\nwrite fig\n", "red\n" * 100])
def test_an_observation_is_rendered_as_in_the_demonstrations(output: str) -> None:
    assert said_about(0, output) == observation(True, output)


@pytest.mark.parametrize("output", ["", "/bin/sh: 1: cannot open plum: No such file\n"])
def test_a_failed_command_is_one_word_without_the_shells_text(output: str) -> None:
    assert said_about(2, output) == observation(False, output) == "failed"


def test_the_prompts_are_those_of_the_demonstrations() -> None:
    assert Template(CONFIG["agent"]["system_template"]).render() == SYSTEM_PROMPT
    assert Template(CONFIG["agent"]["instance_template"]).render(task="a\nb") == "a\nb"


def test_every_command_of_the_demonstrations_is_one_action_within_the_answers_limit() -> None:
    for command in (*COMMANDS, SUBMIT):
        written = command.format(source="plum", target="fig")
        assert re.findall(CONFIG["model"]["action_regex"], fenced(written), re.DOTALL) == [written]
        answer = build_tokenizer().encode(fenced(written), add_special_tokens=False).ids
        assert len(answer) + 1 <= CONFIG["model"]["model_kwargs"]["max_tokens"]


@pytest.mark.parametrize("answer", ["", "tac plum > fig", "```\n\n```", "```\ntac plum > fig", "ok"])
def test_an_answer_without_a_command_is_no_action_and_ends_the_run(answer: str) -> None:
    assert re.findall(CONFIG["model"]["action_regex"], answer, re.DOTALL) == []
    assert CONFIG["agent"]["max_consecutive_format_errors"] == 1


def test_the_step_limit_is_what_the_longest_task_needs() -> None:
    assert CONFIG["agent"]["step_limit"] == len(("read the list", "first chore", "second chore", "submit"))
