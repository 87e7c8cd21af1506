"""What Chat Completions and Responses have in common: the forms of a fault and of a model."""

from __future__ import annotations

from typing import Any

from gyre.proxy.faults import Fault, FaultKind

_STATUS = {
    FaultKind.BAD_REQUEST: 400,
    FaultKind.TOO_LONG: 400,
    FaultKind.UNAUTHORIZED: 401,
    FaultKind.NOT_FOUND: 404,
    FaultKind.CLOSED: 410,
    FaultKind.TOO_LARGE: 413,
    FaultKind.UNAVAILABLE: 503,
}
_CODE = {
    FaultKind.TOO_LONG: "context_length_exceeded",
    FaultKind.UNAUTHORIZED: "invalid_api_key",
    FaultKind.CLOSED: "run_closed",
    FaultKind.UNAVAILABLE: "engine_unavailable",
}


def openai_fault(fault: Fault, history: str) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body). `history` is the field that a prompt over the context is blamed on."""
    message = str(fault)
    if fault.kind is FaultKind.TOO_LONG:
        message = (
            f"This model's maximum context length is {fault.context_tokens} tokens. However, your messages "
            f"resulted in {fault.prompt_tokens} tokens. Please reduce the length of the messages."
        )
    kind = "server_error" if fault.kind is FaultKind.UNAVAILABLE else "invalid_request_error"
    param = history if fault.kind is FaultKind.TOO_LONG else fault.field or None
    error = {"message": message, "type": kind, "param": param, "code": _CODE.get(fault.kind)}
    return _STATUS[fault.kind], {"error": error}


def openai_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "gyre"}
