"""The store's records as etcd's messages, and back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gyre.store.etcd.api import Message, message_class
from gyre.store.protocol import Compare, Event, Get, KeyValue, Target, Txn, prefix_end

_RESULTS = {"==": 0, ">": 1, "<": 2, "!=": 3}
_TARGETS = {Target.CREATE_REVISION: 1, Target.MOD_REVISION: 2, Target.VALUE: 3}
_DELETE = 1


def key_value(kv: Message) -> KeyValue:
    return KeyValue(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def event(message: Message) -> Event:
    kind = "delete" if message.type == _DELETE else "put"
    previous = key_value(message.prev_kv) if message.HasField("prev_kv") else None
    return Event(kind, key_value(message.kv), previous)


def compare(of: Compare) -> Message:
    fields: dict[str, Any] = {of.target.value: of.operand}
    return message_class("Compare")(key=of.key.encode(), result=_RESULTS[of.op], target=_TARGETS[of.target], **fields)


def put_op(key: str, value: bytes, lease: int) -> Message:
    request = message_class("PutRequest")(key=key.encode(), value=value, lease=lease)
    return message_class("RequestOp")(request_put=request)


def delete_op(key: str) -> Message:
    return message_class("RequestOp")(request_delete_range=message_class("DeleteRangeRequest")(key=key.encode()))


def get_op(key: str) -> Message:
    return message_class("RequestOp")(request_range=message_class("RangeRequest")(key=key.encode()))


def txn_request(
    txn: Txn, compares: Iterable[Message] = (), puts: Iterable[Message] = (), gets: Iterable[Message] = ()
) -> Message:
    """`txn`, with further compares and puts; `gets` are read where a compare failed, after those of `txn`."""
    reads = [get_op(get.key) for get in txn.gets]
    writes = [*(put_op(put.key, put.value, put.lease) for put in txn.puts), *(delete_op(d.key) for d in txn.deletes)]
    return message_class("TxnRequest")(
        compare=[*(compare(each) for each in txn.compares), *compares],
        success=[*writes, *puts, *reads],
        failure=[*reads, *gets],
    )


def found(response: Message) -> list[KeyValue | None]:
    """What the gets of a transaction read, in their order."""
    ranges = [each.response_range for each in response.responses if each.HasField("response_range")]
    return [key_value(each.kvs[0]) if each.kvs else None for each in ranges]


def range_request(prefix: str, limit: int, after: str, revision: int) -> Message:
    # A key just after `after` in byte order is `after` and a zero byte.
    low = max(prefix.encode(), after.encode() + b"\0") if after else prefix.encode()
    return message_class("RangeRequest")(key=low or b"\0", range_end=prefix_end(prefix), limit=limit, revision=revision)


def watch_request(prefix: str, revision: int) -> Message:
    create = message_class("WatchCreateRequest")(
        key=prefix.encode() or b"\0", range_end=prefix_end(prefix), start_revision=revision, prev_kv=True
    )
    return message_class("WatchRequest")(create_request=create)


def end_watch_request(number: int) -> Message:
    return message_class("WatchRequest")(cancel_request=message_class("WatchCancelRequest")(watch_id=number))


def reads_only(compares: Sequence[Compare], keys: Iterable[str]) -> Txn:
    return Txn(compares=tuple(compares), gets=tuple(Get(key) for key in keys))
