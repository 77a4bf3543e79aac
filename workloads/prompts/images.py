"""Images for vision models as data URLs: generated at a given size, or from a folder."""

import base64
import random
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ampacity.files import digest, read_bytes
from ampacity.workloads.errors import WorkloadError, check_keys, whole_between

_KINDS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}
_SIDE_MAX = 8192
_TILE = 32  # pixels that have one colour: a generated image compresses, and no two are the same


@dataclass(frozen=True)
class Images:
    """``count`` images in every prompt: of one of the sizes (width, height), or files in turn."""

    count: int = 1
    sizes: tuple[tuple[int, int], ...] = ()
    files: tuple[str, ...] = ()

    def parts(self, request_id: int) -> list[dict[str, Any]]:
        """Return content parts of a chat message; generated images are unique, files repeat."""
        numbers = range(request_id * self.count, (request_id + 1) * self.count)
        return [
            {"type": "image_url", "image_url": {"url": self._url(number)}} for number in numbers
        ]

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        sizes = [f"{width}x{height}" for width, height in self.sizes]
        files = {"files": len(self.files), "contents": digest(*self.files)} if self.files else {}
        return {"count": self.count, "sizes": sizes, **files}

    def _url(self, number: int) -> str:
        if self.files:
            return _file_url(self.files[number % len(self.files)])
        width, height = self.sizes[number % len(self.sizes)]
        return "data:image/png;base64," + base64.b64encode(png(width, height, number)).decode(
            "ascii"
        )


@cache
def _file_url(path: str) -> str:
    content = base64.b64encode(read_bytes(path)).decode("ascii")
    return f"data:image/{_KINDS[Path(path).suffix.lower()]};base64,{content}"


def png(width: int, height: int, seed: int) -> bytes:
    """Return an RGB image of coloured tiles (PNG: ISO/IEC 15948), the same for the same seed."""
    colours = random.Random(seed)
    rows = []
    for top in range(0, height, _TILE):
        line = b"".join(
            colours.randbytes(3) * min(_TILE, width - left) for left in range(0, width, _TILE)
        )
        rows.append((b"\x00" + line) * min(_TILE, height - top))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def parse_images(value: object, where: str) -> Images:
    """Parse ``{count: 2, sizes: [512x512]}`` or ``{folder: PATH}``. Raises WorkloadError."""
    if not isinstance(value, Mapping) or bool(value.get("sizes")) == bool(value.get("folder")):
        raise WorkloadError(f"{where}: write 'sizes: [512x512]' or 'folder: PATH', and 'count: 1'")
    check_keys(value, ("count", "sizes", "folder"), where)
    count = whole_between(value.get("count", 1), f"{where}: count", 1, 100)
    if value.get("folder"):
        return Images(count, files=_files(Path(str(value["folder"])).expanduser(), where))
    sizes = value["sizes"] if isinstance(value["sizes"], list) else [value["sizes"]]
    return Images(count, sizes=tuple(_size(size, where) for size in sizes))


def _files(folder: Path, where: str) -> tuple[str, ...]:
    try:
        found = sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in _KINDS)
    except OSError as error:
        raise WorkloadError(f"{where}: folder {folder} cannot be read: {error.strerror}") from None
    if not found:
        raise WorkloadError(f"{where}: folder {folder} has no image ({', '.join(_KINDS)})")
    return tuple(found)


def _size(value: object, where: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,5})\s*x\s*(\d{1,5})\s*", str(value))
    if not match or not all(1 <= int(side) <= _SIDE_MAX for side in match.groups()):
        raise WorkloadError(f"{where}: size {value!r}: write WIDTHxHEIGHT in pixels, as 512x512")
    return int(match[1]), int(match[2])
