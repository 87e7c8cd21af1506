"""etcd's API: its message classes and methods, from the definitions that the `etcd3` package carries.

The package's own stubs do not import beside current protobuf, and its files would claim names in protobuf's common
pool. So its definitions are read out of its files, which are never run, into a pool of our own.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory

from gyre.errors import BadInput

Message = Any
"""A protobuf message of the private pool; its class is made at run time."""

_FILES = ("kv", "auth", "rpc")
"""In the order in which they build on each other."""
_ARGUMENT = re.compile(r"\bserialized_pb=(?P<wrapped>_b\()?(?P<literal>b?'(?:[^'\\]|\\.)*')")


@dataclass(frozen=True)
class Method:
    """One method of the API, as grpc calls it."""

    path: str
    encode: Callable[[Message], bytes]
    decode: Callable[[bytes], Message]
    streams: bool
    """Requests and answers are streams, both."""


@cache
def message_class(name: str) -> Any:
    """The class of a message, for example `TxnRequest`."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"etcdserverpb.{name}"))


@cache
def method(service: str, name: str) -> Method:
    """A method, for example `method("KV", "Txn")`."""
    found = _pool().FindServiceByName(f"etcdserverpb.{service}").FindMethodByName(name)
    request = message_factory.GetMessageClass(found.input_type)
    response = message_factory.GetMessageClass(found.output_type)
    return Method(
        f"/etcdserverpb.{service}/{name}", request.SerializeToString, response.FromString, found.client_streaming
    )


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for name in _FILES:
        pool.AddSerializedFile(_definition(_folder() / f"{name}_pb2.py"))
    return pool


def _folder() -> Path:
    spec = importlib.util.find_spec("etcd3")
    if spec is None or spec.origin is None:
        raise BadInput("store", "etcd", "it needs the cluster extra: pip install 'gyre[cluster]'")
    return Path(spec.origin).parent / "etcdrpc"


def _definition(path: Path) -> bytes:
    """The serialized file descriptor in generated code: the argument `serialized_pb`, wrapped in `_b` or bare.

    The code around it is not even parsed: that alone would take more memory than all of etcd's API.
    """
    found = _ARGUMENT.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise BadInput("store", str(path), "it must hold etcd's API definitions; install etcd3==0.12.0")
    literal = ast.literal_eval(found["literal"])
    return literal.encode("latin1") if found["wrapped"] else literal
