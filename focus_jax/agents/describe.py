"""What identifies a setting, as plain data: a journal tells by it whether it is continued under the same settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def describe(value: Any) -> Any:
    """A value as data that JSON can hold, the same in every process.

    Args:
        value: numbers, texts, lists, mappings and dataclasses of such; functions and classes, which are named by module
            and qualified name; anything else with a `repr` of its own.

    Returns:
        Plain data. A dataclass is its class's name and its fields.

    Raises:
        TypeError: a lambda, or a `repr` that holds an address, which changes with every process.

    Example:
        >>> describe((len, 0.5, {"a": None}))
        ['builtins.len', 0.5, {'a': None}]
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [describe(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    is_named = hasattr(value, "__qualname__")
    if is_dataclass(value) and not is_named:
        return {"class": type(value).__qualname__} | {f.name: describe(getattr(value, f.name)) for f in fields(value)}
    text = f"{value.__module__}.{value.__qualname__}" if is_named else repr(value)
    if re.search(r" at 0x[0-9a-fA-F]+|<lambda>", text):
        raise TypeError(
            f"{type(value).__qualname__}: expected what can be told from another in every process, got {text}; "
            "make it a frozen dataclass or give it a __repr__ (a lambda: make it a named function)"
        )
    return text
