"""gyre.actors.mailbox against the plainest model of it: three lists."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.actors.mailbox import Envelope, Mailbox
from gyre.actors.supervision import MailboxFull, Overflow


@dataclass(frozen=True)
class Data:
    number: int


@dataclass(frozen=True)
class Control:
    number: int


OPS = st.lists(st.sampled_from(["tell", "ask", "control", "own", "take", "take control", "restart"]), max_size=60)


@given(OPS, st.integers(1, 4), st.sampled_from(Overflow))
@settings(deadline=None)
def test_what_goes_first_what_waits_and_what_is_turned_away(ops: list[str], limit: int, overflow: Overflow) -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox("a", limit, overflow)
    mailbox.set_control(frozenset({Control}))
    own: list[Envelope] = []
    control: list[Envelope] = []
    data: list[Envelope] = []
    dropped = refused = 0
    for number, op in enumerate(ops):
        message = Control(number) if op == "control" else Data(number)
        envelope = Envelope(message, loop.create_future() if op == "ask" else None, 0.0, float(number))
        match op:
            case "own":
                mailbox.put_own(envelope)
                own.append(envelope)
            case "tell" | "ask" | "control":
                queue = control if op == "control" else data
                tells = [waiting for waiting in data if waiting.answer is None]
                taken = True
                if len(queue) == limit:
                    if op == "tell" and overflow is Overflow.DROP_OLDEST and tells:
                        data.remove(tells[0])
                        dropped += 1
                    else:
                        taken, refused = False, refused + 1
                try:
                    mailbox.put(envelope)
                except MailboxFull:
                    assert not taken
                else:
                    assert taken
                    queue.append(envelope)
            case "restart":
                mailbox.forget_own()
                mailbox.set_control(frozenset({Control}))
                own.clear()
            case _:
                queues = (own, control, data) if op == "take" else (own, control)
                right = next((queue.pop(0) for queue in queues if queue), None)
                assert mailbox.take(data=op == "take") is right
        came_s = [envelope.came_s for queue in (own, control, data) for envelope in queue]
        assert mailbox.oldest_came_s() == min(came_s, default=None)
        assert (len(mailbox), mailbox.control_waiting) == (len(came_s), len(control))
        assert (mailbox.dropped, mailbox.refused) == (dropped, refused)
    assert mailbox.empty() == [*control, *data]
    loop.close()


def test_when_it_is_learnt_what_is_control_that_which_waits_is_put_in_its_place() -> None:
    mailbox = Mailbox("a", 9, Overflow.REFUSE)
    envelopes = [Envelope(message, None, 0.0, 0.0) for message in (Data(0), Control(1), Data(2), Control(3))]
    for envelope in envelopes:
        mailbox.put(envelope)
    mailbox.set_control(frozenset({Control}))
    taken = [mailbox.take(data=True) for _ in range(5)]
    assert taken == [envelopes[1], envelopes[3], envelopes[0], envelopes[2], None]
