"""Reading a config.json: every wrong value is a ValueError that names the field, the value and what is allowed."""

from __future__ import annotations

import sys
from typing import Any

REQUIRED: Any = object()
# a spec has an object for each of a model's layers, and a checkpoint names for each expert
COUNTS = ("num_hidden_layers", "num_local_experts", "num_experts", "n_routed_experts")
MOST = 10_000


class HfConfig:
    """A JSON object with typed getters. A value of null counts as absent, as it does in transformers."""

    def __init__(self, values: dict[str, Any], prefix: str = "", aliases: dict[str, str] | None = None):
        """aliases: the family's own name of a field, for the name that it is asked for by."""
        if not isinstance(values, dict):
            raise ValueError(f"{prefix.rstrip('.') or 'config'}: got {values!r}, must be a JSON object")
        self.values, self.prefix, self.aliases = values, prefix, aliases or {}

    def error(self, name: str, value: Any, allowed: str) -> ValueError:
        return ValueError(f"{self.prefix}{self.named(name)}: got {value!r}, must be {allowed}")

    def named(self, name: str) -> str:
        """The field's name in this config."""
        return name if self.values.get(name) is not None else self.aliases.get(name, name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(self.named(name))
        return default if value is None else value

    def with_defaults(self, defaults: dict[str, Any] | None = None, aliases: dict[str, str] | None = None) -> HfConfig:
        """The same config with values for absent fields, and other names for some."""
        known = {name: value for name, value in self.values.items() if value is not None}
        return HfConfig(self.values | (defaults or {}) | known, self.prefix, self.aliases | (aliases or {}))

    def _typed(self, name: str, default: Any, kinds: type | tuple[type, ...], allowed: str) -> Any:
        value = self.get(name)
        if value is None:
            if default is REQUIRED:
                raise ValueError(f"{self.prefix}{self.named(name)}: missing, must be {allowed}")
            return default
        # JSON's true is an int to Python
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.error(name, value, allowed)
        return value

    def integer(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._typed(name, default, int, "an integer of at least 1")
        if value is not None and value < 1:
            raise self.error(name, value, "an integer of at least 1")
        if name in COUNTS and value is not None and value > MOST:
            raise self.error(name, value, f"at most {MOST}")
        return value

    def number(self, name: str, default: Any = REQUIRED, low: float | None = None) -> Any:
        value = self._typed(name, default, (int, float), "a number")
        if value is not None and not _is_finite(value):
            raise self.error(name, value, "a finite number")  # Python's JSON has NaN and Infinity
        if low is not None and value is not None and value < low:
            raise self.error(name, value, f"at least {low}")
        return value if value is None else float(value)

    def optional(self, name: str, default: float | None, low: float | None = None) -> float | None:
        """A number; null is no number, and absent is ``default``."""
        return self.number(name, default, low) if name not in self.values else self.number(name, None, low)

    def refuse(self, **neutral: Any) -> None:
        """ValueError for a field that is there and has another value than this."""
        for name, value in neutral.items():
            if self.get(name, value) != value:
                raise self.error(name, self.get(name), f"{value!r}: nothing else is supported")

    def boolean(self, name: str, default: bool) -> bool:
        return self._typed(name, default, bool, "true or false")

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._typed(name, REQUIRED, list, "a list of numbers")
        if not all(isinstance(v, int | float) and not isinstance(v, bool) and _is_finite(v) for v in value):
            raise self.error(name, value, "a list of finite numbers")
        return tuple(float(v) for v in value)

    def choice(self, name: str, default: Any, known: dict[str, Any]) -> Any:
        """The entry of ``known`` that the field names."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, value, f"one of {', '.join(known)}")
        return known[value]

    def check_keys(self, known: set[str], required: set[str]) -> None:
        for name in self.values:
            if name not in known:
                raise ValueError(f"{self.prefix}{name}: unknown, allowed are {', '.join(sorted(known))}")
        for name in sorted(required):
            if self.values.get(name) is None:
                raise ValueError(f"{self.prefix}{name}: missing")


def _is_finite(value: float) -> bool:
    """Of a float or an integer of any size."""
    return abs(value) <= sys.float_info.max
