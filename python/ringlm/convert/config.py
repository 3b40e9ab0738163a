"""config.json with typed access: what is missing or of another kind is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringlm.errors import FileFormatError

from .checkpoint import read_json


class Config:
    """The fields of a model, and what transformers assumes where one is missing or null.

    Every accessor raises FileFormatError for a field that is not there, or not of that kind.
    """

    def __init__(
        self,
        file: Path,
        fields: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.file = file
        self._fields = fields
        self._defaults = defaults or {}
        self._aliases = aliases or {}

    @classmethod
    def read(cls, folder: Path) -> Config:
        file = folder / "config.json"
        if not file.is_file():
            raise FileFormatError(f"{folder}: there is no config.json; expected a checkpoint of transformers")
        return cls(file, read_json(file))

    def read_as(self, defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> Config:
        """The same with defaults, and with other names for some fields: common name -> name in the file."""
        return Config(self.file, self._fields, defaults, aliases)

    def section(self, key: str) -> Config:
        """An object within, as a config of its own."""
        return Config(self.file, self.table(key))

    def get(self, key: str) -> Any:
        """A field or its default; None when there is neither."""
        value = self._fields.get(self._aliases.get(key, key))
        return self._defaults.get(key) if value is None else value

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def integer(self, key: str, least: int = 1) -> int:
        value = self._required(key)
        if type(value) is not int or not least <= value < 2**31:
            raise self._wrong(key, value, f"an integer of at least {least}")
        return value

    def number(self, key: str) -> float:
        value = self._required(key)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise self._wrong(key, value, "a number")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if not value > 0:
            raise self._wrong(key, value, "a positive number")
        return value

    def flag(self, key: str) -> bool:
        value = self._required(key)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self._required(key)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def numbers(self, key: str, n: int) -> list[float]:
        value = self._required(key)
        if not isinstance(value, list) or not all(type(v) in (int, float) and abs(v) < 1e30 for v in value):
            raise self._wrong(key, value, "a list of numbers")
        if len(value) != n:
            raise FileFormatError(f"{self.file}: {key} has {len(value)} elements; expected {n}")
        return [float(v) for v in value]

    def words(self, key: str, n: int) -> list[str]:
        value = self._required(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value) or len(value) != n:
            raise self._wrong(key, value, f"a list of {n} strings")
        return value

    def _required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise FileFormatError(f"{self.file}: {key} is missing; the model cannot be described without it")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> FileFormatError:
        text = repr(value)
        return FileFormatError(f"{self.file}: {key} is {text[:80]}; expected {expected}")
