"""What /v1/models says, as vLLM says it."""

import zlib
from collections.abc import Sequence
from typing import Any


def model_cards(names: Sequence[str], root: str, max_model_len: int, created: int) -> list[dict[str, Any]]:
    """One card each: the first name is the base model, the others are its adapters."""
    base = names[0]
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root if name == base else name,
            "parent": None if name == base else base,
            "max_model_len": max_model_len if name == base else None,
            "permission": [_permission(name, created)],
        }
        for name in names
    ]


def _permission(name: str, created: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{zlib.crc32(name.encode('utf-8', 'replace')):016x}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
