"""Answers other than 200, with vLLM's bodies."""

import json
from collections.abc import Mapping
from typing import Any

_ABSENT = object()


class ApiError(Exception):
    """An answer other than 200, with its headers."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        param: str | None = None,
        *,
        code: int | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = error_body(message, kind, param, status if code is None else code)


def error_body(message: str, kind: str, param: str | None, code: int | str) -> bytes:
    value = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def invalid(
    field: str, message: str, value: object = _ABSENT, *, kind: str = "value_error"
) -> ApiError:
    """Return the error for a missing field or one of a wrong type, as vLLM reports pydantic's."""
    detail: dict[str, Any] = {"type": kind, "loc": field, "msg": message}
    if value is not _ABSENT:
        detail["input"] = _shown(value)
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", field)


def bad_value(field: str, value: object, message: str) -> ApiError:
    return ApiError(
        400, f"{message} (parameter={field}, value={_shown(value)})", "BadRequestError", field
    )


def bad_json(body: bytes, error: Exception) -> ApiError:
    """Return the error for a body that is not JSON; `error`: a cause if json finds none."""
    place, reason = 0, str(error)
    try:
        json.loads(body)
    except json.JSONDecodeError as found:
        place, reason = found.pos, found.msg
    except (ValueError, RecursionError):
        pass
    detail = {
        "type": "json_invalid",
        "loc": f"body.{place}",
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": reason},
    }
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", f"body.{place}")


def _shown(value: object) -> object:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, str) and len(value) > 200:
        return value[:200] + "..."
    return value
