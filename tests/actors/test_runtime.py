"""What gyre.actors.runtime promises, on an event loop whose time is virtual: every duration here is exact and free."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.actors.inspection import ActorInfo, ActorList, ListActors, totals_by_kind
from gyre.actors.runtime import (
    NEVER,
    Actor,
    ActorFailed,
    ActorStopped,
    ActorSystem,
    Backoff,
    Died,
    Failure,
    LocalRef,
    MailboxFull,
    Overflow,
    handles,
)
from gyre.errors import BadInput, GyreError, Refused, Unavailable

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------ virtual time


class _Jump(selectors.DefaultSelector):
    """Instead of waiting, moves its loop's clock on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen again: the test hangs"
            self.now_s += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now_s


def virtually(scenario: Coroutine[Any, Any, T]) -> T:
    """Run it on a fresh loop. Whatever the loop would only log (an error nobody took) fails the test."""
    complaints: list[dict[str, Any]] = []
    loop = _VirtualLoop()
    loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
    try:
        result = loop.run_until_complete(scenario)
        leftover = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert leftover == []
    finally:
        gc.collect()
        loop.close()
    assert complaints == []
    return result


def now_s() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------------------------ an actor to test with


@dataclass(frozen=True)
class Note:
    """Write it down."""

    text: str


@dataclass(frozen=True)
class Notes:
    """Asks for what is written down, and answers it."""

    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sleep:
    """Be busy for so long."""

    s: float


@dataclass(frozen=True)
class SleepBeside:
    """The same, concurrently."""

    s: float


@dataclass(frozen=True)
class Raise:
    error: BaseException
    after_s: float = 0


@dataclass(frozen=True)
class RaiseBeside:
    error: BaseException


@dataclass(frozen=True)
class Do:
    """Call `what` with the actor."""

    what: Callable[[Clerk], object]


@dataclass(frozen=True)
class Unknown:
    pass


class Clerk(Actor):
    def __init__(self, life: list[str] | None = None) -> None:
        self.notes: list[str] = []
        self.life = [] if life is None else life

    async def pre_start(self) -> None:
        self.life.append("start")

    async def post_stop(self) -> None:
        self.life.append("stop")

    @handles(Note)
    async def write(self, note: Note) -> Note:
        self.notes.append(note.text)
        return note

    @handles(Notes)
    async def read(self, _: Notes) -> Notes:
        return Notes(tuple(self.notes))

    @handles(Sleep)
    async def sleep(self, message: Sleep) -> Sleep:
        await asyncio.sleep(message.s)
        return message

    @handles(SleepBeside, concurrent=True)
    async def sleep_beside(self, message: SleepBeside) -> SleepBeside:
        await asyncio.sleep(message.s)
        return message

    @handles(Raise)
    async def fail(self, message: Raise) -> None:
        await asyncio.sleep(message.after_s)
        raise message.error

    @handles(RaiseBeside, concurrent=True)
    async def fail_beside(self, message: RaiseBeside) -> None:
        raise message.error

    @handles(Do)
    async def do(self, message: Do) -> Note:
        message.what(self)
        return Note("done")


async def notes(ref: LocalRef) -> tuple[str, ...]:
    return (await ref.ask(Notes(), 1000.0, Notes)).texts


# ------------------------------------------------------------------------------------------------ messages


def test_messages_are_taken_one_at_a_time_in_the_order_they_came() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            clerk.tell(Note("a"))
            clerk.tell(Sleep(5))
            clerk.tell(Note("b"))
            asked = asyncio.create_task(clerk.ask(Note("c"), 60, Note))
            await asyncio.sleep(0)
            clerk.tell(Note("d"))
            assert await asked == Note("c")
            assert now_s() == 5
            assert await notes(clerk) == ("a", "b", "c", "d")

    virtually(scenario())


@given(st.lists(st.sampled_from(["tell", "ask", "sleep"]), max_size=30))
@settings(max_examples=15, deadline=None)
def test_no_message_is_lost_repeated_or_overtaken(kinds: list[str]) -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system, asyncio.TaskGroup() as group:
            clerk = system.spawn("clerk", Clerk)
            for i, kind in enumerate(kinds):
                if kind == "tell":
                    clerk.tell(Note(str(i)))
                elif kind == "ask":
                    group.create_task(clerk.ask(Note(str(i)), 1000, Note))
                    await asyncio.sleep(0)
                else:
                    clerk.tell(Sleep(1))
            assert await notes(clerk) == tuple(str(i) for i, kind in enumerate(kinds) if kind != "sleep")

    virtually(scenario())


def test_a_concurrent_handler_runs_beside_the_others() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system, asyncio.TaskGroup() as group:
            clerk = system.spawn("clerk", Clerk)
            waits = [group.create_task(clerk.ask(SleepBeside(s), 60, SleepBeside)) for s in (30, 20)]
            await asyncio.sleep(0)
            assert await clerk.ask(Note("meanwhile"), 1, Note) == Note("meanwhile")
            assert now_s() == 0
            assert [await wait for wait in waits] == [SleepBeside(30), SleepBeside(20)]
            assert now_s() == 30

    virtually(scenario())


def test_a_full_mailbox_takes_no_more_and_says_so() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk, mailbox_messages=2)
            clerk.tell(Sleep(5))
            await asyncio.sleep(1)
            clerk.tell(Note("a"))
            clerk.tell(Note("b"))
            with pytest.raises(MailboxFull, match="s/clerk has 2 messages waiting"):
                clerk.tell(Note("c"))
            with pytest.raises(MailboxFull):
                await clerk.ask(Note("d"), 60, Note)
            await asyncio.sleep(10)
            assert await notes(clerk) == ("a", "b")

    virtually(scenario())


def test_no_more_concurrent_handlers_run_than_messages_may_wait() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk, mailbox_messages=2)
            for _ in range(2):
                clerk.tell(SleepBeside(5))
            await asyncio.sleep(1)
            assert await clerk.ask(Notes(), 60, Notes) == Notes()
            assert now_s() == 5

    virtually(scenario())


def test_a_busy_actor_lets_others_on_the_loop_have_their_turn() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk, mailbox_messages=100_000)
            for _ in range(50_000):
                clerk.tell(Note("x"))
            turns = 0
            asked = asyncio.create_task(notes(clerk))
            while not asked.done():
                await asyncio.sleep(0)
                turns += 1
            assert turns > 100

    virtually(scenario())


def test_a_message_that_no_handler_takes_is_refused_by_name_and_does_no_harm() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            clerk.tell(Unknown())
            with pytest.raises(BadInput, match=r"s/clerk: 'Unknown' is not allowed; Do, Note, Notes, .* are taken"):
                await clerk.ask(Unknown(), 60, Note)
            clerk.tell(Note("a"))
            assert await notes(clerk) == ("a",)

    virtually(scenario())


def test_an_actor_handles_what_its_parents_class_handles_and_may_do_it_otherwise() -> None:
    class Loud(Clerk):
        @handles(Note)
        async def write_loudly(self, note: Note) -> Note:
            return Note(note.text.upper())

    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            loud = system.spawn("loud", Loud)
            assert await loud.ask(Note("a"), 1, Note) == Note("A")
            assert await notes(loud) == ()

    virtually(scenario())


def test_two_handlers_of_one_message_are_an_error_of_the_class() -> None:
    with pytest.raises(TypeError, match="handles Note twice"):

        class Torn(Actor):
            @handles(Note)
            async def one(self, _: Note) -> None: ...

            @handles(Note)
            async def other(self, _: Note) -> None: ...


# ------------------------------------------------------------------------------------------------ overflow, priority


def test_where_the_newest_says_all_the_oldest_tell_makes_room_and_an_ask_is_still_refused() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk, mailbox_messages=3, overflow=Overflow.DROP_OLDEST)
            clerk.tell(Sleep(5))
            await asyncio.sleep(1)
            asked = asyncio.create_task(clerk.ask(Note("asked"), 60, Note))
            await asyncio.sleep(0)
            for text in "abcd":
                clerk.tell(Note(text))
            with pytest.raises(MailboxFull, match="s/clerk has 3 messages waiting"):
                await clerk.ask(Note("too many"), 60, Note)
            assert await asked == Note("asked")
            assert await notes(clerk) == ("asked", "c", "d")
            (info,) = (await clerk.ask(ListActors(), 1, ActorList)).actors
            assert (info.totals.dropped, info.totals.refused) == (2, 1)

    virtually(scenario())


def test_where_only_asks_wait_none_makes_room_for_a_tell() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk, mailbox_messages=1, overflow=Overflow.DROP_OLDEST)
            clerk.tell(Sleep(5))
            await asyncio.sleep(1)
            asked = asyncio.create_task(clerk.ask(Note("asked"), 60, Note))
            await asyncio.sleep(0)
            with pytest.raises(MailboxFull):
                clerk.tell(Note("told"))
            assert await asked == Note("asked")

    virtually(scenario())


@dataclass(frozen=True)
class Urgent:
    text: str


class Hurried(Clerk):
    @handles(Urgent, control=True)
    async def write_first(self, message: Urgent) -> Note:
        self.notes.append(message.text)
        return Note(message.text)


def test_a_control_message_goes_before_the_others_and_has_room_of_its_own() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Hurried, mailbox_messages=2)
            clerk.tell(Note("first"))
            clerk.tell(Urgent("told before its class was known to be urgent"))
            await asyncio.sleep(0)
            clerk.tell(Sleep(5))
            await asyncio.sleep(1)
            clerk.tell(Note("a"))
            clerk.tell(Note("b"))
            with pytest.raises(MailboxFull):
                clerk.tell(Note("c"))
            clerk.tell(Urgent("1"))
            clerk.tell(Urgent("2"))
            with pytest.raises(MailboxFull):
                clerk.tell(Urgent("3"))
            await asyncio.sleep(10)
            assert await notes(clerk) == (
                *("told before its class was known to be urgent", "first"),
                *("1", "2", "a", "b"),
            )

    virtually(scenario())


def test_control_is_taken_while_as_many_concurrent_handlers_run_as_may() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Hurried, mailbox_messages=1)
            clerk.tell(SleepBeside(50))
            await asyncio.sleep(1)
            assert await clerk.ask(Urgent("now"), 1, Note) == Note("now")
            assert now_s() == 1

    virtually(scenario())


def test_a_handler_is_control_or_concurrent_and_a_subclass_may_change_its_mind() -> None:
    with pytest.raises(TypeError, match="Note cannot be both concurrent and control"):
        handles(Note, concurrent=True, control=True)

    class Calm(Hurried):
        @handles(Urgent)
        async def write_in_turn(self, message: Urgent) -> Note:
            self.notes.append(message.text)
            return Note(message.text)

    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            calm = system.spawn("calm", Calm)
            calm.tell(Note("a"))
            calm.tell(Urgent("b"))
            assert await notes(calm) == ("a", "b")

    virtually(scenario())


# ------------------------------------------------------------------------------------------------ asks


def test_an_ask_ends_at_its_deadline_and_the_work_goes_on() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            with pytest.raises(Unavailable, match="s/clerk did not answer Sleep within 2 s"):
                await clerk.ask(Sleep(5), 2, Sleep)
            assert now_s() == 2
            await notes(clerk)
            assert now_s() == 5

    virtually(scenario())


def test_an_ask_given_up_before_its_turn_is_not_handled() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            clerk.tell(Sleep(5))
            with pytest.raises(Unavailable):
                await clerk.ask(Note("too late"), 2, Note)
            given_up = asyncio.create_task(clerk.ask(Note("given up"), 60, Note))
            await asyncio.sleep(0)
            given_up.cancel()
            assert await notes(clerk) == ()

    virtually(scenario())


@dataclass(frozen=True)
class PassOn:
    """Ask the next clerk to sleep, with a deadline of one's own, in one of three ways."""

    s: float
    deadline_s: float
    how: str = "at once"


class Middle(Actor):
    def __init__(self, clerk: LocalRef) -> None:
        self.clerk = clerk
        self.met: list[str] = []

    @handles(PassOn)
    async def pass_on(self, message: PassOn) -> Sleep:
        ask = self.clerk.ask(Sleep(message.s), message.deadline_s, Sleep)
        if message.how == "as a task of its own":
            self.task(ask, lambda _: Note("done"), lambda error: Note(str(error)))
            return Sleep(0)
        try:
            return await (asyncio.create_task(ask) if message.how == "in a task" else ask)
        except Unavailable as error:
            self.met.append(f"at {now_s():g}: {error}")
            raise

    @handles(Note)
    async def met_in_task(self, note: Note) -> None:
        self.met.append(f"at {now_s():g}: {note.text}")

    @handles(Notes)
    async def read(self, _: Notes) -> Notes:
        return Notes(tuple(self.met))


@pytest.mark.parametrize("how", ["at once", "in a task"])
def test_an_ask_made_for_an_ask_ends_with_the_patience_of_its_asker(how: str) -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            middle = system.spawn("middle", lambda: Middle(clerk))
            with pytest.raises(Unavailable):
                await middle.ask(PassOn(100, 1000, how), 2, Sleep)
            assert now_s() == 2
            assert await middle.ask(Notes(), 1, Notes) == Notes(("at 2: s/clerk did not answer Sleep within 2 s",))
            assert now_s() == 2

    virtually(scenario())


def test_the_smaller_of_two_deadlines_counts_and_none_is_left_over_for_the_next_message() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            middle = system.spawn("middle", lambda: Middle(clerk))
            with pytest.raises(Unavailable, match="s/clerk did not answer Sleep within 1 s"):
                await middle.ask(PassOn(5, 1), 60, Sleep)
            assert now_s() == 1
            middle.tell(PassOn(10, 1000))
            assert await middle.ask(Notes(), 100, Notes) == Notes(("at 1: s/clerk did not answer Sleep within 1 s",))
            assert now_s() == 15

    virtually(scenario())


def test_what_an_actor_does_on_its_own_account_outlives_the_ask_in_which_it_began() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            middle = system.spawn("middle", lambda: Middle(clerk))
            assert await middle.ask(PassOn(10, 60, "as a task of its own"), 2, Sleep) == Sleep(0)
            await asyncio.sleep(20)
            assert await middle.ask(Notes(), 1, Notes) == Notes(("at 10: done",))

    virtually(scenario())


def test_when_the_time_of_a_request_is_over_nothing_more_is_asked_for_it() -> None:
    class Late(Actor):
        def __init__(self, clerk: LocalRef, met: list[str]) -> None:
            self.clerk = clerk
            self.met = met

        @handles(Sleep)
        async def sleep_then_ask(self, message: Sleep) -> Note:
            await asyncio.sleep(message.s)
            try:
                return await self.clerk.ask(Note("too late"), 60, Note)
            except Unavailable as error:
                self.met.append(str(error))
                raise

    async def scenario() -> None:
        met: list[str] = []
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            late = system.spawn("late", lambda: Late(clerk, met))
            with pytest.raises(Unavailable):
                await late.ask(Sleep(5), 2, Note)
            await asyncio.sleep(10)
            assert met == ["s/clerk is not asked Note: the time of the request it is for is over"]
            assert await notes(clerk) == ()

    virtually(scenario())


def test_a_child_begun_for_an_ask_has_all_the_time_that_it_wants() -> None:
    class Parent(Actor):
        @handles(Note)
        async def begin(self, note: Note) -> Note:
            self.spawn("child", lambda: Middle(clerks[0])).tell(PassOn(10, 60))
            return note

    clerks: list[LocalRef] = []

    async def scenario() -> None:
        reports: list[Failure] = []
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            clerks.append(system.spawn("clerk", Clerk))
            await system.spawn("parent", Parent).ask(Note("begin"), 2, Note)
            await asyncio.sleep(30)
        assert reports == []

    virtually(scenario())


def test_an_answer_of_another_kind_is_an_error_at_the_asker() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            with pytest.raises(BadInput, match="a Notes is expected"):
                await clerk.ask(Note("a"), 1, Notes)

    virtually(scenario())


@pytest.mark.parametrize("message", [Raise, RaiseBeside])
@pytest.mark.parametrize("error", [Refused("stale token"), BadInput("port", 0, "1 and up"), Unavailable("no engine")])
def test_a_gyre_error_in_an_ask_is_its_answer_and_the_actor_lives_on(
    message: type[Raise] | type[RaiseBeside], error: GyreError
) -> None:
    async def scenario() -> None:
        life: list[str] = []
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", lambda: Clerk(life))
            clerk.tell(Note("kept"))
            with pytest.raises(type(error)) as met:
                await clerk.ask(message(error), 60, Note)
            assert met.value is error
            assert await notes(clerk) == ("kept",)
            assert life == ["start"]

    virtually(scenario())


# ------------------------------------------------------------------------------------------------ failure, supervision


@pytest.mark.parametrize("message", [Raise, RaiseBeside])
def test_a_failed_actor_is_reported_and_starts_afresh_with_the_same_mailbox(
    message: type[Raise] | type[RaiseBeside],
) -> None:
    async def scenario() -> None:
        life: list[str] = []
        reports: list[Failure] = []
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            clerk = system.spawn("clerk", lambda: Clerk(life), restart=Backoff(initial_s=3))
            clerk.tell(Note("forgotten"))
            with pytest.raises(ActorFailed, match=rf"s/clerk failed in {message.__name__}: ValueError\('x'\)") as met:
                await clerk.ask(message(ValueError("x")), 60, Note)
            assert isinstance(met.value.__cause__, ValueError)
            await asyncio.sleep(1)
            clerk.tell(Note("waits through the back-off"))
            assert await notes(clerk) == ("waits through the back-off",)
            assert now_s() == 3
        assert life == ["start", "stop", "start", "stop"]
        (report,) = reports
        assert (report.actor, report.during, report.restart_in_s) == ("s/clerk", message.__name__, 3)
        assert "ValueError: x" in report.trace
        assert "raise message.error" in report.trace

    virtually(scenario())


def test_any_error_in_a_tell_is_a_failure_for_nobody_else_can_learn_of_it() -> None:
    async def scenario() -> None:
        reports: list[Failure] = []
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            clerk = system.spawn("clerk", Clerk)
            clerk.tell(Raise(Refused("no")))
            assert await notes(clerk) == ()
        assert [report.error for report in reports] == ["Refused('no')"]

    virtually(scenario())


def test_a_cancellation_from_inside_a_handler_does_not_end_the_actor_silently() -> None:
    async def scenario() -> None:
        reports: list[Failure] = []
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            clerk = system.spawn("clerk", Clerk)
            with pytest.raises(ActorStopped):
                await clerk.ask(Raise(asyncio.CancelledError()), 60, Note)
            clerk.tell(RaiseBeside(asyncio.CancelledError()))
            await asyncio.sleep(1)
            assert await notes(clerk) == ()
        assert [report.during for report in reports] == ["Raise", "RaiseBeside"]

    virtually(scenario())


def test_the_back_off_doubles_up_to_its_maximum_and_past_the_limit_the_system_ends() -> None:
    class Doomed(Actor):
        async def pre_start(self) -> None:
            started_at_s.append(now_s())
            raise OSError("no disk")

    started_at_s: list[float] = []
    reports: list[Failure] = []

    async def scenario() -> None:
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            doomed = system.spawn("doomed", Doomed, restart=Backoff(initial_s=1, max_s=4, limit=5, window_s=600))
            with pytest.raises(ActorStopped):
                await doomed.ask(Note("never"), 1000, Note)
            await asyncio.sleep(1000)
            raise AssertionError("the block is ended before")

    with pytest.raises(ActorFailed, match=r"s/doomed gave up after failing in pre_start: OSError\('no disk'\)"):
        virtually(scenario())
    assert started_at_s == [0, 1, 3, 7, 11, 15]
    assert [report.restart_in_s for report in reports] == [1, 2, 4, 4, 4, None]


def test_failures_far_apart_do_not_add_up() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk, restart=Backoff(limit=1, window_s=10))
            for _ in range(5):
                clerk.tell(Raise(ValueError("x")))
                await asyncio.sleep(11)
            assert await notes(clerk) == ()

    virtually(scenario())


@given(
    st.builds(
        Backoff,
        initial_s=st.floats(0.01, 10),
        max_s=st.floats(0.01, 100),
        limit=st.integers(0, 40),
    )
)
def test_back_off_never_shrinks_never_passes_its_maximum_and_escalates_past_its_limit(backoff: Backoff) -> None:
    delays = [backoff.delay_s(failures) for failures in range(1, backoff.limit + 1)]
    assert backoff.delay_s(backoff.limit + 1) is None
    given_s = [delay for delay in delays if delay is not None]
    assert len(given_s) == backoff.limit
    assert given_s == sorted(given_s)
    assert all(delay <= backoff.max_s for delay in given_s)


def test_a_factory_that_fails_is_a_failure_of_the_actor() -> None:
    async def scenario() -> None:
        attempts: list[int] = []

        def factory() -> Actor:
            attempts.append(1)
            if len(attempts) < 3:
                raise OSError("not yet")
            return Clerk()

        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", factory)
            assert await notes(clerk) == ()
            assert len(attempts) == 3

    virtually(scenario())


# ------------------------------------------------------------------------------------------------ death watch


class Mourner(Clerk):
    @handles(Died)
    async def mourn(self, died: Died) -> None:
        self.notes.append(f"{died.name}: {died.reason}")


async def watch(mourner: LocalRef, *refs: LocalRef) -> None:
    for ref in refs:
        await mourner.ask(Do(lambda actor, ref=ref: actor.watch(ref)), 1, Note)


def test_who_watches_an_actor_hears_of_its_end_once_with_the_reason() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            mourner = system.spawn("mourner", Mourner)
            clerks = [system.spawn(name, Clerk) for name in ("stopped", "drained", "itself", "spared")]
            await watch(mourner, *clerks, clerks[0])
            await clerks[0].stop()
            await clerks[1].drain()
            clerks[2].tell(Do(lambda actor: actor.stop()))
            await clerks[2].stopped()
            assert await notes(mourner) == tuple(
                f"s/{name}: it was stopped" for name in ("stopped", "drained", "itself")
            )

    virtually(scenario())


def test_a_restart_is_no_death_and_giving_up_is_with_its_cause() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            chief = system.spawn("chief", lambda: Chief([], Backoff(limit=1)))
            mourner = system.spawn("mourner", Mourner)
            found: list[LocalRef] = []
            await chief.ask(Lend(found.append), 1, Note)
            await watch(mourner, *found)
            chief.tell(Raise(ValueError("x")))
            await asyncio.sleep(5)
            assert await notes(mourner) == ()
            chief.tell(Raise(ValueError("y")))
            await asyncio.sleep(5)
            assert await notes(mourner) == ("s/chief/clerk: it gave up after failing in Raise: ValueError('y')",)

    virtually(scenario())


def test_one_who_has_ended_already_is_mourned_at_once() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            mourner, clerk = system.spawn("mourner", Mourner), system.spawn("clerk", Clerk)
            await clerk.stop()
            await watch(mourner, clerk)
            assert await notes(mourner) == ("s/clerk: it was stopped",)

    virtually(scenario())


def test_a_watch_can_be_taken_back_and_ends_with_the_instance_that_began_it() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            mourner = system.spawn("mourner", Mourner)
            one, other = system.spawn("one", Clerk), system.spawn("other", Clerk)
            await watch(mourner, one, other)
            await mourner.ask(Do(lambda actor: actor.unwatch(one)), 1, Note)
            await one.stop()
            assert await notes(mourner) == ()
            mourner.tell(Raise(ValueError("x")))
            assert await notes(mourner) == ()
            await other.stop()
            assert await notes(mourner) == ()

    virtually(scenario())


def test_who_does_not_handle_death_may_not_watch() -> None:
    async def scenario() -> None:
        reports: list[Failure] = []
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            clerk = system.spawn("clerk", Clerk)
            with pytest.raises(ActorFailed, match="Clerk watches s/clerk and does not handle Died"):
                await clerk.ask(Do(lambda actor: actor.watch(clerk)), 1, Note)

    virtually(scenario())


# ------------------------------------------------------------------------------------------------ children


@dataclass(frozen=True)
class Lend:
    """Give `to` the reference of the chief's clerk."""

    to: Callable[[LocalRef], object]


class Chief(Actor):
    def __init__(self, life: list[str], restart: Backoff) -> None:
        self.life = life
        self.restart = restart

    async def pre_start(self) -> None:
        self.life.append("chief starts")
        self.clerk = self.spawn("clerk", lambda: Clerk(self.life), restart=self.restart)

    async def post_stop(self) -> None:
        self.life.append("chief stops")

    @handles(Note)
    async def pass_on(self, note: Note) -> Note:
        return await self.clerk.ask(note, 10, Note)

    @handles(Raise)
    async def break_clerk(self, message: Raise) -> None:
        self.clerk.tell(message)

    @handles(Do)
    async def fail(self, _: Do) -> None:
        raise ValueError("chief")

    @handles(Lend)
    async def lend(self, message: Lend) -> Note:
        message.to(self.clerk)
        return Note("lent")


def test_a_child_that_gives_up_fails_its_parent_which_starts_afresh_with_a_fresh_child() -> None:
    async def scenario() -> None:
        life: list[str] = []
        reports: list[Failure] = []
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            chief = system.spawn("chief", lambda: Chief(life, NEVER))
            assert await chief.ask(Note("a"), 60, Note) == Note("a")
            chief.tell(Raise(ValueError("x")))
            await asyncio.sleep(1)
            assert await chief.ask(Note("b"), 60, Note) == Note("b")
        assert [(report.actor, report.restart_in_s) for report in reports] == [
            ("s/chief/clerk", None),
            ("s/chief", 0.1),
        ]
        assert life == ["chief starts", "start", "stop", "chief stops"] * 2

    virtually(scenario())


def test_past_every_limit_a_failure_rises_through_all_parents_and_ends_the_system() -> None:
    class Head(Actor):
        async def pre_start(self) -> None:
            self.spawn(
                "chief", lambda: Chief(life, Backoff(initial_s=1, limit=1)), restart=Backoff(initial_s=1, limit=1)
            )

    life: list[str] = []
    reports: list[Failure] = []

    async def scenario() -> None:
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            system.spawn("head", Head, restart=NEVER)
            while True:
                clerk = next((info for info in system.actors().actors if info.name.endswith("clerk")), None)
                if clerk is not None and clerk.state == "running":
                    system.roots["head"]._children["chief"].ref.tell(Raise(ValueError("x")))
                await asyncio.sleep(5)

    with pytest.raises(ActorFailed, match="s/head gave up after failing in child s/head/chief"):
        virtually(scenario())
    names = [report.actor.rpartition("/")[2] for report in reports]
    assert names == [*("clerk", "clerk", "chief"), *("clerk", "clerk", "chief"), "head"]
    assert life.count("start") == life.count("stop") == 4


def test_a_child_that_starts_again_does_not_disturb_its_parent() -> None:
    async def scenario() -> None:
        life: list[str] = []
        async with ActorSystem.running("s") as system:
            chief = system.spawn("chief", lambda: Chief(life, Backoff()))
            chief.tell(Raise(ValueError("x")))
            await asyncio.sleep(1)
            assert await chief.ask(Note("b"), 60, Note) == Note("b")
        assert life == ["chief starts", "start", "stop", "start", "stop", "chief stops"]

    virtually(scenario())


def test_children_end_with_the_instance_that_spawned_them() -> None:
    async def scenario() -> None:
        life: list[str] = []
        async with ActorSystem.running("s") as system:
            chief = system.spawn("chief", lambda: Chief(life, Backoff()))
            chief.tell(Do(lambda _: None))
            await asyncio.sleep(1)
            assert life == ["chief starts", "start", "stop", "chief stops", "chief starts", "start"]

    virtually(scenario())


def test_a_name_is_free_again_when_its_actor_has_ended() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            with pytest.raises(ValueError, match="'clerk' must be free"):
                system.spawn("clerk", Clerk)
            await clerk.stop()
            assert await notes(system.spawn("clerk", Clerk)) == ()

    virtually(scenario())


# ------------------------------------------------------------------------------------------------ timers and tasks


def test_a_timer_sends_its_message_when_its_time_has_come() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            await clerk.ask(Do(lambda actor: actor.after(5, Note("timer"))), 1, Note)
            await clerk.ask(Do(lambda actor: actor.after(3, Note("taken back")).cancel()), 1, Note)
            await asyncio.sleep(4.9)
            assert await notes(clerk) == ()
            await asyncio.sleep(0.2)
            assert await notes(clerk) == ("timer",)

    virtually(scenario())


def test_what_an_actor_sends_itself_goes_first_and_is_never_refused() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk, mailbox_messages=1)
            await clerk.ask(Do(lambda actor: actor.after(1, Note("timer"))), 1, Note)
            clerk.tell(Sleep(5))
            await asyncio.sleep(2)
            clerk.tell(Note("told before the timer's was taken"))
            await asyncio.sleep(10)
            assert await notes(clerk) == ("timer", "told before the timer's was taken")

    virtually(scenario())


def test_the_result_of_a_task_comes_as_a_message() -> None:
    async def work(s: float) -> str:
        await asyncio.sleep(s)
        return f"worked {s:g} s"

    async def broken() -> str:
        raise OSError("no disk")

    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            await clerk.ask(Do(lambda actor: actor.task(work(5), on_done=Note)), 1, Note)
            await clerk.ask(Do(lambda actor: actor.task(work(1), on_done=lambda _: None)), 1, Note)
            await clerk.ask(Do(lambda actor: actor.task(broken(), on_error=lambda error: Note(str(error)))), 1, Note)
            assert now_s() == 0
            await asyncio.sleep(6)
            assert await notes(clerk) == ("no disk", "worked 5 s")

    virtually(scenario())


def test_an_error_of_a_task_that_nobody_expects_fails_the_actor() -> None:
    async def broken() -> None:
        raise OSError("no disk")

    async def cancelled_inside() -> None:
        raise asyncio.CancelledError

    async def scenario() -> None:
        reports: list[Failure] = []
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            clerk = system.spawn("clerk", Clerk)
            for work in (broken, cancelled_inside):
                clerk.tell(Do(lambda actor, work=work: actor.task(work())))
                await asyncio.sleep(1)
        assert [report.error for report in reports] == ["OSError('no disk')", "CancelledError()"]
        assert "broken" in reports[0].during

    virtually(scenario())


def test_timers_and_tasks_end_with_the_instance_that_made_them() -> None:
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(5)
        finally:
            ended.append(f"at {now_s():g}")
        return "of a former life"

    def begin(actor: Clerk) -> None:
        actor.after(5, Note("of a former life"))
        actor.task(work(), on_done=Note)

    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            clerk.tell(Do(begin))
            await asyncio.sleep(1)
            clerk.tell(Raise(ValueError("x")))
            await asyncio.sleep(10)
            assert await notes(clerk) == ()
            assert ended == ["at 1"]

    virtually(scenario())


def test_what_an_instance_sent_itself_and_never_took_is_not_for_the_next_one() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            clerk.tell(Do(lambda actor: actor.after(1, Note("of a former life"))))
            clerk.tell(Raise(ValueError("x"), after_s=5))
            assert await notes(clerk) == ()

    virtually(scenario())


# ------------------------------------------------------------------------------------------------ the end


def test_at_the_end_of_the_block_all_actors_stop_the_last_one_first() -> None:
    async def scenario() -> None:
        ends: list[str] = []

        def named(name: str) -> Callable[[], Actor]:
            class Named(Actor):
                async def post_stop(self) -> None:
                    ends.append(name)

            return Named

        async with ActorSystem.running("s") as system:
            for name in ("store", "node", "cell"):
                system.spawn(name, named(name))
            await asyncio.sleep(0)
        assert ends == ["cell", "node", "store"]

    virtually(scenario())


def test_stop_lets_the_message_in_hand_finish_and_refuses_the_rest() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system, asyncio.TaskGroup() as group:
            clerk = system.spawn("clerk", Clerk)
            in_hand = group.create_task(clerk.ask(Sleep(5), 60, Sleep))
            beside = asyncio.create_task(clerk.ask(SleepBeside(50), 60, SleepBeside))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(clerk.ask(Note("never"), 60, Note))
            await asyncio.sleep(1)
            await clerk.stop()
            assert now_s() == 5
            assert await in_hand == Sleep(5)
            for refused in (beside, waiting):
                with pytest.raises(ActorStopped):
                    await refused
            with pytest.raises(ActorStopped):
                await clerk.ask(Note("after"), 60, Note)
            clerk.tell(Note("dropped"))
            await clerk.stopped()

    virtually(scenario())


def test_a_handler_that_does_not_end_is_cancelled_at_the_deadline_of_the_stop() -> None:
    async def scenario() -> None:
        life: list[str] = []
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", lambda: Clerk(life))
            asked = asyncio.create_task(clerk.ask(Sleep(1000), 2000, Sleep))
            await asyncio.sleep(1)
            await clerk.stop(deadline_s=5)
            assert now_s() == 6
            with pytest.raises(ActorStopped, match="ended before it answered Sleep"):
                await asked
        assert life == ["start", "stop"]

    virtually(scenario())


def test_drain_handles_all_that_was_taken_lets_work_beside_end_and_refuses_what_comes_later() -> None:
    async def scenario() -> None:
        life: list[str] = []
        async with ActorSystem.running("s") as system, asyncio.TaskGroup() as group:
            clerk = system.spawn("clerk", lambda: Clerk(life))
            asks: list[asyncio.Task[object]] = [
                group.create_task(clerk.ask(message, 60, type(message)))
                for message in (Sleep(5), SleepBeside(8), Note("waited"))
            ]
            await asyncio.sleep(1)
            drained = group.create_task(clerk.drain(60))
            await asyncio.sleep(1)
            with pytest.raises(ActorStopped, match="s/clerk is ending"):
                await clerk.ask(Note("later"), 60, Note)
            clerk.tell(Note("dropped"))
            assert [await ask for ask in asks] == [Sleep(5), SleepBeside(8), Note("waited")]
            await drained
            assert now_s() == 13
            with pytest.raises(ActorStopped, match="s/clerk has ended"):
                await clerk.ask(Note("after"), 60, Note)
            assert life == ["start", "stop"]

    virtually(scenario())


def test_drain_drains_the_children_too() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            chief = system.spawn("chief", lambda: Chief([], Backoff()))
            found: list[LocalRef] = []
            await chief.ask(Lend(found.append), 1, Note)
            (clerk,) = found
            asked = [asyncio.create_task(clerk.ask(message, 60, type(message))) for message in (Sleep(3), Note("x"))]
            await asyncio.sleep(1)
            await chief.drain(60)
            assert [await ask for ask in asked] == [Sleep(3), Note("x")]

    virtually(scenario())


def test_at_the_deadline_of_a_drain_what_is_left_is_refused() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            asks = [asyncio.create_task(clerk.ask(message, 900, Note)) for message in (Sleep(500), Note("x"))]
            await asyncio.sleep(1)
            await clerk.drain(5)
            assert now_s() == 6
            assert [type(error) for error in await asyncio.gather(*asks, return_exceptions=True)] == [ActorStopped] * 2

    virtually(scenario())


def test_an_actor_may_end_itself() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            assert await clerk.ask(Do(lambda actor: actor.stop()), 1, Note) == Note("done")
            await clerk.stopped()

    virtually(scenario())


def test_an_actor_waiting_to_start_again_stops_at_once() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk, restart=Backoff(initial_s=500, max_s=500))
            clerk.tell(Raise(ValueError("x")))
            await asyncio.sleep(1)
            await clerk.stop()
            assert now_s() == 1

    virtually(scenario())


def test_concurrent_work_cancelled_before_its_first_step_is_answered_too() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            await notes(clerk)
            asks = [asyncio.create_task(clerk.ask(SleepBeside(5), 60, SleepBeside)) for _ in range(3)]
            asks.append(asyncio.create_task(clerk.ask(Do(lambda actor: actor.stop()), 60, Note)))
            await asyncio.gather(*asks, return_exceptions=True)
            assert [type(ask.exception()) for ask in asks[:3]] == [ActorStopped] * 3
            assert now_s() == 0

    virtually(scenario())


def test_an_error_of_the_block_comes_out_as_it_is_after_the_actors_have_stopped() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            await notes(system.spawn("clerk", lambda: Clerk(life)))
            raise KeyError("mine")

    life: list[str] = []
    with pytest.raises(KeyError, match="mine"):
        virtually(scenario())
    assert life == ["start", "stop"]


def test_a_cancelled_block_stops_its_actors() -> None:
    async def scenario() -> None:
        life: list[str] = []

        async def program() -> None:
            async with ActorSystem.running("s") as system:
                system.spawn("clerk", lambda: Clerk(life))
                await asyncio.sleep(1000)

        running = asyncio.create_task(program())
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert life == ["start", "stop"]

    virtually(scenario())


def test_an_error_in_post_stop_is_reported_and_stops_nothing() -> None:
    class Untidy(Actor):
        async def post_stop(self) -> None:
            raise OSError("left open")

    async def scenario() -> None:
        reports: list[Failure] = []
        async with ActorSystem.running("s", on_failure=reports.append) as system:
            untidy = system.spawn("untidy", Untidy)
            await asyncio.sleep(0)
            await untidy.stop()
        assert [(report.during, report.error) for report in reports] == [("post_stop", "OSError('left open')")]

    virtually(scenario())


# ------------------------------------------------------------------------------------------------ seen from outside


async def seen(ref: LocalRef) -> dict[str, ActorInfo]:
    return {info.name: info for info in (await ref.ask(ListActors(), 1, ActorList)).actors}


def test_a_busy_or_full_actor_tells_what_it_is_at() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Hurried, mailbox_messages=2)
            other = system.spawn("other", Clerk)
            await notes(clerk)
            clerk.tell(SleepBeside(90))
            await asyncio.sleep(1)
            clerk.tell(Sleep(50))
            await asyncio.sleep(1)
            clerk.tell(Note("a"))
            await asyncio.sleep(3)
            clerk.tell(Note("b"))
            clerk.tell(Urgent("c"))
            with pytest.raises(MailboxFull):
                clerk.tell(Note("d"))
            await asyncio.sleep(4)
            info = (await seen(other))["s/clerk"]
            assert info == (await seen(clerk))["s/clerk"]
            assert (info.state, info.totals.kind, info.in_hand, info.in_hand_s) == ("running", "Hurried", "Sleep", 8)
            assert (info.waiting, info.control, info.mailbox_messages, info.oldest_s) == (3, 1, 2, 7)
            assert (info.beside, info.tasks, info.totals.handled, info.totals.refused) == (1, 0, 1, 1)
            await asyncio.sleep(100)
            info = (await seen(clerk))["s/clerk"]
            assert (info.waiting, info.oldest_s, info.in_hand, info.beside) == (0, 0, "", 0)
            assert (info.totals.handled, info.slowest_s, info.totals.handling_s) == (6, 90, 140)

    virtually(scenario())


def test_asks_that_nobody_waited_for_any_more_are_counted() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerk = system.spawn("clerk", Clerk)
            clerk.tell(Sleep(5))
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await clerk.ask(Note("late"), 1, Note)
            assert await notes(clerk) == ()
            assert (await seen(clerk))["s/clerk"].totals.expired == 3

    virtually(scenario())


def test_failures_and_states_are_told_and_children_stand_below_their_parents() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            chief = system.spawn("chief", lambda: Chief([], Backoff(initial_s=50, max_s=50)))
            await chief.ask(Note("x"), 1, Note)
            chief.tell(Raise(ValueError("x")))
            await asyncio.sleep(1)
            assert list(await seen(chief)) == ["s/chief", "s/chief/clerk"]
            info = (await seen(chief))["s/chief/clerk"]
            assert (info.state, info.totals.failures) == ("waiting to start again", 1)
            assert info.last_failure == "in Raise: ValueError('x')"

    virtually(scenario())


def test_totals_by_kind_keep_what_ended_actors_have_done() -> None:
    async def scenario() -> None:
        async with ActorSystem.running("s") as system:
            clerks = [system.spawn(name, Clerk) for name in "abc"]
            for clerk in clerks:
                await notes(clerk)
            await clerks[0].stop()
            await clerks[1].stop()
            listed = await clerks[2].ask(ListActors(), 1, ActorList)
            assert [info.name for info in listed.actors] == ["s/c"]
            (totals,) = totals_by_kind(listed)
            assert (totals.kind, totals.handled) == ("Clerk", 3)

    virtually(scenario())
