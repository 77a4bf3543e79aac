"""Read a YAML run file, and locate in it the setting that a message is about."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from ampacity.files import read_text
from ampacity.values import ConfigError
from ampacity.workloads.profile import PlainYaml, read_yaml


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the settings of a run file by option name with ``_``; the file may use ``_`` or ``-``.

    Raises ConfigError, WorkloadError.
    """
    value = read_yaml(path)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"{path}: a run file is a mapping of settings, as in 'url: http://127.0.0.1:8000/v1'"
        )
    found: dict[str, Any] = {}
    for name, content in value.items():
        plain = name.replace("-", "_")
        if plain in found:
            raise ConfigError(f"{path}: {name} is given twice")
        if content is None:  # as of a template whose variable was not set: perhaps a limit
            message = f"{plain} is empty: give a value or drop the line"
            raise ConfigError(in_run_file(path, (), message))
        found[plain] = content
    return found


def in_run_file(path: Path, flags: Collection[str], message: str) -> str:
    """Return ``message`` with the file, line and name of the setting that it is about.

    That is the setting that the message names first, or one whose value it repeats. Settings in
    ``flags`` came from the command line.
    """
    root = yaml.compose(read_text(path), Loader=PlainYaml)
    found: list[tuple[int, int, str]] = []  # position in the message, line, name
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        name = key.value.replace("-", "_")
        named = re.search(
            rf"--{name.replace('_', '-')}(?![\w-])|^{name}\b|'{re.escape(key.value)}'", message
        )
        values = [node for node in (value, *value.value) if isinstance(node, yaml.ScalarNode)]
        repeated = [node for node in values if len(node.value) > 1 and node.value in message]
        quoted = min(repeated, key=lambda node: message.find(node.value), default=None)
        if name not in flags and (named or quoted):
            at = named.start() if named else len(message)
            found.append((at, (quoted or key).start_mark.line + 1, name))
    if not found:
        return message if flags else f"{path}: {message}"
    at, line, name = min(found)
    message = re.sub(rf"--{name.replace('_', '-')}(?![\w-])", name, message)
    return f"{path}:{line}: {message}" if at < len(message) else f"{path}:{line}: {name}: {message}"
