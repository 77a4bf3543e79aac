"""Answers other than 200, in vLLM's shape."""

import json
from collections.abc import Mapping


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


def invalid(field: str, message: str) -> ApiError:
    """Return the refusal of one field, named as in `body.messages.0`."""
    return ApiError(400, f"{field}: {message}", "BadRequestError", field)
