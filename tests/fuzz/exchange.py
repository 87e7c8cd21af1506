"""One request and its answer, both made of bytes: what a fuzzer tries, and what must hold whatever they are.

An input is a request's body and, behind `SAID`, what the policy says to it. The body goes the way of the gateway's front
door: JSON, dialect, session, rendering. It is refused with a Fault, or it has an answer that is valid in its dialect, in
one piece and as a stream; sent back behind the same history, that answer is recognised, or the request refused. The
journal of it all makes the same run again. Anything else raises.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.model_folder import SPECIAL, byte_tokenizer

from gyre.actors.messages import OpenRun
from gyre.ids import GroupId, RunId
from gyre.proxy.bodies import json_body
from gyre.proxy.conversation import Conversation, Finish, Reply, Speaker, digest, request_digest
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.dialects.spoken import Spoken
from gyre.proxy.faults import Fault, FaultKind
from gyre.proxy.rendering import Rendering
from gyre.proxy.sampling import Ending, Stretch
from gyre.proxy.session import Call, Session
from gyre.proxy.stops import StopSearch
from gyre.trajectory.journal import SEGMENT_HEADER, JournalRecord, encode, read

SAID = b"\n\xff said \xff\n"
"""Between the body and what is said to it. No body that is JSON has it."""
PATHS = ("chat/completions", "responses", "messages")
CONTEXT_TOKENS = 4_000
_STATUSES = {FaultKind.BAD_REQUEST: 400, FaultKind.TOO_LONG: 400}
_SPOKEN = Spoken()


class Exchange:
    def __init__(self, path: str, rendering: Rendering) -> None:
        dialects: Mapping[str, Dialect] = dict(
            zip(PATHS, (_SPOKEN.chat, _SPOKEN.responses, _SPOKEN.anthropic), strict=True)
        )
        self._path = path
        self._dialect = dialects[path]
        self._rendering = rendering
        self._ids_of_bytes = _ids_of_bytes()
        self._ids_of_names = {name.encode(): byte_tokenizer().token_to_id(name) for name in SPECIAL}

    def attempt(self, data: bytes) -> Fault | None:
        """The whole exchange; the fault that the request is refused with, if it is."""
        request, _, said = data.partition(SAID)
        key = digest(data).hex()  # another for each input, so that none can have learnt the ids of its own answer
        session = self._session(key)
        journal: list[JournalRecord] = []
        try:
            body = json_body(request, CONTEXT_TOKENS)
            if self._path == "messages":
                self._count(session, body)
            conversation, call = self._begin(session, journal, body)
        except Fault as fault:
            self._check_fault(fault)
            return fault
        self._sample(session, journal, call, said)
        answer = self._answer(session, conversation, call)
        delivered = session.deliver(call.id)
        journal += [] if delivered is None else [delivered]
        try:
            _, then = self._begin(session, journal, self._continued(body, answer))
            assert then.base == call.id or self._leaves_no_trace(conversation, answer)
        except Fault as fault:
            self._check_fault(fault)
        self._check_run(session, journal)
        return None

    def _session(self, key: str) -> Session:
        opened = OpenRun(RunId("r"), GroupId("g"), 1, key, "scripted", 1.0, 400)
        return Session(opened, self._rendering, _SPOKEN.by_name())

    def _begin(
        self, session: Session, journal: list[JournalRecord], body: Mapping[str, Any]
    ) -> tuple[Conversation, Call]:
        conversation = self._dialect.parse(body)
        asked = request_digest(self._dialect.name, body)
        call, records = session.begin(conversation, body, asked, self._dialect, {}, CONTEXT_TOKENS, 0.0)
        journal += records
        assert session.find(asked, {}) is call
        return conversation, call

    def _count(self, session: Session, body: Mapping[str, Any]) -> None:
        """`count_tokens` takes what is taken as a request."""
        try:
            conversation = _SPOKEN.anthropic.parse(body)
        except Fault:
            try:
                session.count_tokens(_SPOKEN.anthropic.parse_count(body))
            except Fault as fault:
                self._check_fault(fault)
            return
        assert session.count_tokens(_SPOKEN.anthropic.parse_count(body)) == session.count_tokens(conversation)

    # ------------------------------------------------------------------------------------------ the answer

    def _sample(self, session: Session, journal: list[JournalRecord], call: Call, said: bytes) -> None:
        """The policy says it, as far as its stop sequences and its limit let it."""
        search, stop, finish = StopSearch(self._rendering.decode, call.stop), None, Finish.LENGTH
        output = array("i")
        for token in (*self._tokens(said), self._rendering.stop_token_ids[0]):
            output.append(token)
            if token in self._rendering.stop_token_ids:
                finish = Finish.STOP
            elif (stop := search.push(token)) is not None:
                finish = Finish.STOP_SEQUENCE
            if finish is not Finish.LENGTH or len(output) == call.max_tokens:
                break
        stretch = Stretch(output, array("f", [-1.0]) * len(output), array("i", [1]) * len(output))
        journal.append(session.sampled(call, stretch))
        journal.append(session.end(call, Ending(finish, stop or "", None, 0, False, 0, 0.0)))

    def _tokens(self, said: bytes) -> Sequence[int]:
        """A token for each byte, whether or not they are text, and one for each special name."""
        tokens: list[int] = []
        place = 0
        while place < len(said):
            name = next((name for name in self._ids_of_names if said.startswith(name, place)), None)
            tokens.append(self._ids_of_bytes[said[place]] if name is None else self._ids_of_names[name])
            place += 1 if name is None else len(name)
        return tokens

    def _answer(self, session: Session, conversation: Conversation, call: Call) -> Mapping[str, Any]:
        plain = session.reply(call, conversation.model)
        reply = replace(plain, forms=conversation.forms, max_tokens=conversation.max_tokens)
        body = strict_json(json.dumps(self._dialect.body(reply)).encode())
        for include_usage in (False, True):
            self._check_stream(reply, include_usage)
        return body

    def _check_stream(self, reply: Reply, include_usage: bool) -> None:
        events = self._dialect.events(reply, include_usage=include_usage)
        if self._path == PATHS[0]:
            assert events.pop() == b"data: [DONE]\n\n"
        assert events
        for event in events:
            self._check_event(event)

    def _check_event(self, event: bytes) -> None:
        assert event.endswith(b"\n\n")
        *named, said = event[:-2].split(b"\n")
        assert said.startswith(b"data: ")
        value = strict_json(said.removeprefix(b"data: "))
        assert named == ([] if self._path == PATHS[0] else [b"event: " + value["type"].encode()])

    def _continued(self, body: Mapping[str, Any], answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """The next request of a harness that sends the answer back as it came."""
        more = {"role": "user", "content": "Go on."}
        match self._path:
            case "chat/completions":
                return {**body, "messages": [*body["messages"], answer["choices"][0]["message"], more]}
            case "responses":
                asked = body["input"]
                items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
                return {**body, "input": [*items, *answer["output"], more]}
            case _:
                said = {"role": "assistant", "content": answer["content"]}
                return {**body, "messages": [*body["messages"], said, more]}

    def _leaves_no_trace(self, conversation: Conversation, answer: Mapping[str, Any]) -> bool:
        """Whether the answer, sent back, cannot be told: Responses has no items for an empty one, and no border between
        a call and an assistant's turn right before it, nor between a thought alone and the text that comes next."""
        if self._path != "responses":
            return False
        output, last = answer["output"], conversation.messages[-1]
        if not output or last.speaker is not Speaker.ASSISTANT:
            return not output
        thought_alone = not last.text and not last.tool_calls
        return thought_alone or output[0]["type"] not in ("reasoning", "message")

    # ------------------------------------------------------------------------------------------ what must hold

    def _check_fault(self, fault: Fault) -> None:
        status, body = self._dialect.fault(fault)
        assert status == _STATUSES[fault.kind]
        assert "\n" not in str(fault)
        assert strict_json(json.dumps(body).encode())["error"]["message"]
        *events, rest = self._dialect.fault_event(fault).split(b"\n\n")
        assert not rest
        for event in events:
            self._check_event(event + b"\n\n")

    def _check_run(self, session: Session, journal: Sequence[JournalRecord]) -> None:
        trace = session.trace(5)
        assert not trace[0].faults
        restored = self._session(session.opened.key)
        restored.restore(read(SEGMENT_HEADER + b"".join(map(encode, journal))).records)
        assert restored.trace(5) == trace


def strict_json(data: bytes) -> dict[str, Any]:
    """An object of JSON as the strictest client reads it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), "a key is there twice"
        return dict(pairs)

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no value of JSON")

    value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    assert isinstance(value, dict)
    return value


def _ids_of_bytes() -> Sequence[int]:
    """The byte tokenizer's id of each byte; the alphabet is GPT-2's."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    other = iter(range(256, 512))
    tokenizer = byte_tokenizer()
    ids = [tokenizer.token_to_id(chr(byte if byte in plain else next(other))) for byte in range(256)]
    assert None not in ids
    return ids
