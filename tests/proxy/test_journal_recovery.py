"""A journal cut or damaged at any byte: the records before stand, the run goes on from them, and nothing false is read."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from gyre.actors.messages import OpenRun
from gyre.ids import GroupId, RunId
from gyre.proxy.conversation import Finish, request_digest
from gyre.proxy.dialects.openai_chat import OpenAIChat
from gyre.proxy.journal_writer import JournalWriter, look_at_journal, read_journal
from gyre.proxy.journals import find_journal, journals, open_folder
from gyre.proxy.rendering import Rendering
from gyre.proxy.sampling import Ending, Stretch
from gyre.proxy.session import Session, opened_record
from gyre.trajectory.journal import CallDelivered, CallEnded, JournalRecord, encode

from .model_folder import byte_tokenizer

CHAT = OpenAIChat()
TOKENS = array("i", byte_tokenizer().encode("Yes.<|im_end|>", add_special_tokens=False).ids)
OPENED = OpenRun(RunId("r"), GroupId("g"), 1, "key", "scripted", 1.0, 64)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def new_session(rendering: Rendering) -> Session:
    return Session(OPENED, rendering, {CHAT.name: CHAT})


def ask(session: Session, messages: list[Any]) -> list[JournalRecord]:
    """The records of one call that was answered."""
    body = {"model": "m", "messages": messages}
    conversation, digest = CHAT.parse(body), request_digest(CHAT.name, body)
    call, records = session.begin(conversation, body, digest, CHAT, {}, 10**6, 0.0)
    count = len(TOKENS)
    records.append(session.sampled(call, Stretch(TOKENS, array("f", [-1.0]) * count, array("i", [0]) * count)))
    records.append(session.end(call, Ending(Finish.STOP, "", None, 0, False, 0, 0.0)))
    delivered = session.deliver(call.id)
    return [*records, *([] if delivered is None else [delivered])]


HISTORY = [user("A?"), {"role": "assistant", "content": "Yes."}, user("B?")]


@pytest.fixture(scope="module")
def rendering(model_dir: Path) -> Rendering:
    return Rendering(model_dir)


@pytest.fixture(scope="module")
def life(rendering: Rendering) -> list[JournalRecord]:
    session = new_session(rendering)
    return [opened_record(OPENED), *ask(session, HISTORY[:1]), *ask(session, HISTORY)]


def assert_read(folder: Path, whole: list[JournalRecord], least: int) -> int:
    """The first `least` records at least are read, and none that was not written."""
    records = read_journal(folder)
    assert records == whole[: len(records)]
    assert len(records) >= least
    return len(records)


def assert_sound(rendering: Rendering, records: list[JournalRecord]) -> None:
    """A session of these records has just the calls that ended, and the deliveries that are on record."""
    session = new_session(rendering)
    session.restore(records[1:])
    ended = [entry.call for entry in records if isinstance(entry, CallEnded)]
    assert list(session.tree.calls) == ended
    assert session.tree.check() == ()
    delivered = {entry.call for entry in records if isinstance(entry, CallDelivered)}
    assert {call for call in ended if session.tree.delivered(call)} == delivered


@pytest.mark.parametrize("fault", ["cut", "flipped", "zeroed"])
def test_at_any_byte(fault: str, rendering: Rendering, life: list[JournalRecord], tmp_path: Path) -> None:
    data = b"GYREJRN1" + b"".join(map(encode, life))
    ends = [len(b"GYREJRN1" + b"".join(map(encode, life[:count]))) for count in range(len(life) + 1)]
    path = tmp_path / "000000.journal"
    read: set[int] = set()
    for place in range(len(data)):
        damaged = bytearray(data)
        match fault:
            case "cut":
                del damaged[place:]
            case "flipped":
                damaged[place] ^= 0x40
            case _:
                damaged[place:] = bytes(len(data) - place)  # as a file may be after the machine lost its power
        path.write_bytes(bytes(damaged))
        before = max(0, sum(end <= place for end in ends) - 1)
        read.add(assert_read(tmp_path, life, before))
    assert read >= set(range(len(life)))
    for count in range(1, len(life) + 1):
        assert_sound(rendering, life[:count])


async def test_a_run_that_goes_on_behind_a_cut_is_whole_again(
    rendering: Rendering, life: list[JournalRecord], tmp_path: Path
) -> None:
    data = b"GYREJRN1" + b"".join(map(encode, life))
    for cut in range(len(data) - 120, len(data)):
        folder = tmp_path / f"{cut}"
        folder.mkdir()
        (folder / "000000.journal").write_bytes(data[:cut])
        session = new_session(rendering)
        session.restore(read_journal(folder)[1:])
        journal = JournalWriter(folder, fsync=False)
        more = [*HISTORY, {"role": "assistant", "content": "Yes."}, user("C?")]
        for record in ask(session, more):
            journal.append(record)
        await journal.close()
        again = new_session(rendering)
        found = look_at_journal(folder)
        assert found.torn is None
        again.restore(found.records[1:])
        assert again.trace(5) == session.trace(5)


async def test_looking_at_a_journal_that_is_written_to_changes_nothing(
    life: list[JournalRecord], tmp_path: Path
) -> None:
    folder = open_folder(tmp_path, RunId("r"), 1)
    journal = JournalWriter(folder, fsync=False)
    for count, record in enumerate(life, 1):
        journal.append(record)
        assert look_at_journal(folder).records == life[:count]
        (place,) = journals(tmp_path)
        assert find_journal(journals(tmp_path), "r", None) == place
    with (folder / "000000.journal").open("ab") as file:
        file.write(b"half of a rec")
    before = (folder / "000000.journal").read_bytes()
    assert look_at_journal(folder).torn is not None
    assert (folder / "000000.journal").read_bytes() == before
    await journal.close()
