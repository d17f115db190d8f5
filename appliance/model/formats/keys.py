"""The metadata of a GGUF file by architecture; errors name the key."""

from __future__ import annotations

from typing import NoReturn

from appliance.errors import ModelUnreadableError
from appliance.model.formats.gguf import CONVERT_ANEW, Gguf, Skipped

_UINT32_MAX = (1 << 32) - 1


class Keys:
    """Typed access to the metadata; names get the architecture's prefix."""

    def __init__(self, gguf: Gguf) -> None:
        self._gguf = gguf
        self.architecture = self.text("general.architecture") or ""
        if not self.architecture:
            self.fail("it has no key general.architecture, which every model has")

    def fail(self, reason: str, *, hint: str = CONVERT_ANEW) -> NoReturn:
        message = f"model cannot be used: {self._gguf.path}: {reason}"
        raise ModelUnreadableError(message, hint=hint)

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self._gguf.metadata

    def has_any(self) -> bool:
        """True if there is any key of the architecture."""
        return any(key.startswith(f"{self.architecture}.") for key in self._gguf.metadata)

    def starting_with(self, name: str) -> list[str]:
        prefix = f"{self.architecture}.{name}"
        return [key for key in self._gguf.metadata if key.startswith(prefix)]

    def text(self, key: str) -> str | None:
        value = self._gguf.metadata.get(key)
        return value if isinstance(value, str) else None

    def entries(self, key: str) -> int | None:
        """Return the length of the array `key`; None if there is no such array."""
        value = self._gguf.metadata.get(key)
        if isinstance(value, Skipped):
            return value.count
        return len(value) if isinstance(value, tuple) else None

    def has_tensors(self) -> bool:
        return any(tensor.size_bytes for tensor in self._gguf.tensors)

    def is_true(self, name: str, *, default: bool) -> bool:
        return bool(self._gguf.metadata.get(f"{self.architecture}.{name}", default))

    def number(self, name: str, *, default: int | None = None, low: int = 0, high: int = _UINT32_MAX) -> int:
        """Return a whole number within bounds. Without a default, the key is required."""
        key = f"{self.architecture}.{name}"
        value = self._gguf.metadata.get(key, default)
        if value is None:
            self.fail(f"its header has no key {key}")
        if type(value) is not int or not low <= value <= high:
            self.fail(f"its key {key} must be a whole number from {low} to {high}: {value}")
        return value

    def real(self, name: str, *, default: float, low: float, high: float) -> float:
        key = f"{self.architecture}.{name}"
        value = self._gguf.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.fail(f"its key {key} must be a number from {low:g} to {high:g}: {value}")
        return float(value)

    def by_layer(self, name: str, layers: int, *, default: int | tuple[int, ...] | None) -> tuple[int, ...]:
        """Return a number for each layer: the key has one for all layers or an array."""
        key = f"{self.architecture}.{name}"
        value = self._gguf.metadata.get(key)
        if value is None and isinstance(default, tuple):
            return default
        if not isinstance(value, Skipped | tuple):
            return (self.number(name, default=default if isinstance(default, int) else None),) * layers
        numbers = () if isinstance(value, Skipped) else value
        if len(numbers) != layers or not all(type(number) is int and number >= 0 for number in numbers):
            self.fail(f"its key {key} must hold {layers} whole numbers, one a layer")
        return tuple(int(number) for number in numbers)

    def flags(self, name: str) -> tuple[bool, ...] | None:
        """Return the array `name` as booleans; None if it is missing or a single number."""
        key = f"{self.architecture}.{name}"
        value = self._gguf.metadata.get(key)
        if isinstance(value, Skipped) or (isinstance(value, tuple) and any(isinstance(flag, float) for flag in value)):
            self.fail(f"its key {key} must hold booleans or whole numbers, one a layer")
        return tuple(map(bool, value)) if isinstance(value, tuple) else None
