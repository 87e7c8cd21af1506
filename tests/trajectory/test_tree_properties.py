"""The trajectory tree under random runs: rewrites, retries, interleavings, branches, lost answers.

A model keeps every call whole and shares nothing; each sampled token has a log-prob that no other token has, so that a
token can be followed into nodes and lineages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from gyre.ids import CallId, RunId
from gyre.trajectory.records import Lineage, LineageRole
from gyre.trajectory.selection import describe
from gyre.trajectory.tree import Tree

FEW = st.integers(0, 2)  # so few token ids that random prompts and outputs often coincide
TOKENS = st.lists(FEW, max_size=5)


@dataclass
class WholeCall:
    prompt: list[int]
    output: list[int]
    names: list[float]
    """The log-prob of each output token, unique in the run."""
    role: LineageRole
    delivered: bool

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.output

    @property
    def counts(self) -> bool:
        return self.delivered and self.role is not LineageRole.AUXILIARY


@dataclass
class Model:
    tree: Tree = field(default_factory=lambda: Tree(RunId("run"), 1))
    calls: dict[CallId, WholeCall] = field(default_factory=dict)
    growth: list[tuple[int, int]] = field(default_factory=list)
    """For each call that came with its whole prompt: tokens it added, and tokens it had to add."""

    def add(
        self, base: CallId | None, suffix: list[int], output: list[int], role: LineageRole, delivered: bool
    ) -> None:
        call = CallId(str(len(self.calls)))
        prompt = self.calls[base].whole + suffix if base is not None else suffix
        first = sum(len(known.output) for known in self.calls.values())
        names = [-(first + place + 1) / 1024 for place in range(len(output))]
        before = self.tree.tokens
        self.tree.add_call(call, base, suffix, output, names, [len(self.calls)] * len(output), role, delivered)
        if base is None:
            known = max((common(prompt, other.whole) for other in self.calls.values()), default=0)
            self.growth.append((self.tree.tokens - before, len(prompt) - known + len(output)))
        else:
            self.calls[base].delivered = True
        self.calls[call] = WholeCall(prompt, output, names, role, delivered)


def common(a: list[int], b: list[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@st.composite
def runs(draw: DrawFn) -> Model:
    model = Model()
    for _ in range(draw(st.integers(1, 12))):
        role = draw(st.sampled_from(list(LineageRole)))
        delivered = draw(st.booleans() | st.just(True))
        output = draw(TOKENS)
        earlier = draw(st.sampled_from([None, *model.calls]))
        if earlier is None:
            model.add(None, draw(TOKENS), output, role, delivered)
            continue
        known = model.calls[earlier]
        kind = draw(st.sampled_from(["extend", "unrecognised", "rewritten", "cut", "asked again", "sampled again"]))
        if kind == "extend":
            model.add(earlier, draw(TOKENS), output, role, delivered)
        elif kind == "unrecognised":
            model.add(None, known.whole + draw(TOKENS), output, role, delivered)
        elif kind == "rewritten" and known.whole:
            prompt = list(known.whole)
            prompt[draw(st.integers(0, len(prompt) - 1))] = draw(FEW)
            model.add(None, prompt, output, role, delivered)
        elif kind == "cut":
            model.add(None, known.whole[: draw(st.integers(0, len(known.whole)))], output, role, delivered)
        elif kind == "asked again":
            model.add(None, known.prompt, output, role, delivered)
        else:
            model.add(None, known.prompt, known.output, role, delivered)
    for call in model.calls:
        if draw(st.integers(0, 4)) == 0:
            model.tree.deliver(call)
            model.calls[call].delivered = True
    return model


random_run = given(runs())
modest = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@modest
@random_run
def test_every_call_comes_back_exactly_as_it_was_added_and_the_tree_is_sound(model: Model) -> None:
    assert model.tree.check() == ()
    for call, known in model.calls.items():
        assert list(model.tree.prompt_ids(call)) == known.prompt
        assert list(model.tree.output_ids(call)) == known.output
        assert list(model.tree.output_logprobs(call)) == known.names
        assert model.tree.prompt_tokens(call) == len(known.prompt)
        assert model.tree.delivered(call) == known.delivered


@modest
@random_run
def test_on_a_lineage_each_prompt_begins_with_the_whole_call_before_it(model: Model) -> None:
    for view in model.tree.lineages():
        for earlier, later in zip(view.calls, view.calls[1:], strict=False):
            whole = model.calls[earlier].whole
            assert model.calls[later].prompt[: len(whole)] == whole
        assert view.calls[-1] == view.leaf
        assert view.tokens == len(model.calls[view.leaf].whole)


@modest
@random_run
def test_the_tree_never_holds_more_than_the_calls_and_a_walked_prompt_adds_only_what_is_new(model: Model) -> None:
    assert model.tree.tokens <= sum(len(known.whole) for known in model.calls.values())
    assert all(added == needed for added, needed in model.growth)


@modest
@random_run
def test_every_sampled_token_is_in_exactly_one_node(model: Model) -> None:
    radix = model.tree._radix
    held = [
        logprob
        for node in range(1, len(radix.parent))
        if radix.sampled[node]
        for logprob in radix.logprobs_along([node])
    ]
    assert sorted(held) == sorted(name for known in model.calls.values() for name in known.names)


def sampled_names(lineage: Lineage, *, counted_only: bool) -> list[float]:
    _, counted, logprobs, versions = lineage.arrays()
    return [
        name
        for name, flag, version in zip(logprobs, counted, versions, strict=True)
        if version >= 0 and (flag or not counted_only)
    ]


@modest
@random_run
def test_with_room_for_all_lineages_every_token_that_may_count_is_counted_once(model: Model) -> None:
    counted = [name for lineage in model.tree.select(1000) for name in sampled_names(lineage, counted_only=True)]
    assert sorted(counted) == sorted(name for known in model.calls.values() if known.counts for name in known.names)


@modest
@given(runs(), st.integers(1, 5))
def test_a_token_is_counted_in_the_first_selected_lineage_that_holds_it_and_in_no_other(
    model: Model, j_max: int
) -> None:
    may_count = {name for known in model.calls.values() if known.counts for name in known.names}
    selected = model.tree.select(j_max)
    assert len(selected) <= j_max
    seen: set[float] = set()
    for index, lineage in enumerate(selected):
        held = set(sampled_names(lineage, counted_only=False))
        counted = set(sampled_names(lineage, counted_only=True))
        assert lineage.index == index
        assert counted == (held & may_count) - seen
        assert describe(lineage).counted_tokens == len(counted) == sum(lineage.counted)
        seen |= held
    assert all(lineage.role is not LineageRole.AUXILIARY for lineage in selected)


@modest
@random_run
def test_a_selected_lineage_is_its_leafs_prompt_and_output_with_what_was_sampled_where(model: Model) -> None:
    by_name = {name: call for call, known in model.calls.items() for name in known.names}
    leaves = {tuple(known.whole) for known in model.calls.values() if known.counts}
    for lineage in model.tree.select(1000):
        ids, counted, logprobs, versions = lineage.arrays()
        assert tuple(ids) in leaves
        assert len(ids) == len(counted) == len(logprobs) == len(versions)
        for place, version in enumerate(versions):
            if version < 0:
                assert (logprobs[place], counted[place]) == (0.0, 0)
            else:  # the version is the number of the call that sampled the token, at its place in that call
                known = model.calls[by_name[logprobs[place]]]
                assert CallId(str(version)) == by_name[logprobs[place]]
                assert place == len(known.prompt) + known.names.index(logprobs[place])
                assert list(ids[: place + 1]) == known.whole[: place + 1]
