"""Reader of a TOML table: keys are taken out one by one, and what is left over is an unknown key."""

from __future__ import annotations

from typing import Any

from elastic_train.checkpoint.language.cuts import Cuts, Equal, Heads, Sizes
from elastic_train.checkpoint.language.pattern import Pattern, near
from elastic_train.errors import ConfigError


class Table:
    """`place` says in errors where in the document the table is."""

    def __init__(self, values: object, place: str) -> None:
        self.place = place
        if not isinstance(values, dict):
            raise ConfigError(field=place, problem=f"must be a table, not {values!r}.")
        self._values: dict[str, Any] = dict(values)
        self._known: list[str] = []

    def has(self, key: str) -> bool:
        self._known.append(key)
        return key in self._values

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key, of the right kind, or the default where there is none."""
        if not self.has(key):
            return default
        value = self._values.pop(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(key, f"must be a {kind.__name__}, not {value!r}")
        return value

    def need(self, key: str, kind: type) -> Any:
        if not self.has(key):
            raise self.wrong(key, "is missing")
        return self.take(key, kind)

    def choice(self, key: str, words: tuple[str, ...], default: str | None = None) -> Any:
        word = self.need(key, str) if default is None else self.take(key, str, default)
        if word not in words:
            raise self.wrong(key, f"{word!r} is none of {', '.join(words)}{near(word, words)}")
        return word

    def numbers(self, key: str) -> tuple[int, ...]:
        value = self.need(key, list)
        if not all(isinstance(v, int) for v in value):
            raise self.wrong(key, f"must be a list of numbers, not {value!r}")
        return tuple(value)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; one string is a list of one."""
        value = self.take(key, object, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.wrong(key, f"must be a string or a list of them, not {value!r}")
        return tuple(value)

    def patterns(self, key: str) -> tuple[Pattern, ...]:
        found: list[Pattern] = []
        for text in self.strings(key):
            try:
                found.append(Pattern(text))
            except ValueError as error:
                raise self.wrong(key, str(error)) from error
        return tuple(found)

    def pairs(self, key: str) -> tuple[tuple[str, str], ...]:
        """A table of strings."""
        value = self.take(key, dict, {})
        if not all(isinstance(v, str) for v in value.values()):
            raise self.wrong(key, f"must be a table of strings, not {value!r}")
        return tuple(value.items())

    def cuts(self) -> Cuts | None:
        """`parts`, `sizes`, or `heads` with `kv_heads` and `grouped`; None if there is none of them."""
        given = [key for key in ("parts", "sizes", "heads") if self.has(key)]
        if len(given) > 1:
            raise self.wrong(given[1], f"and {given[0]} exclude each other")
        try:
            match given:
                case ["parts"]:
                    return Equal(self.take("parts", int))
                case ["sizes"]:
                    return Sizes(self.numbers("sizes"))
                case ["heads"]:
                    heads = self.take("heads", int)
                    kv_heads = self.take("kv_heads", int, heads)
                    return Heads(heads, kv_heads, self.take("grouped", bool, False))
                case _:
                    return None
        except ValueError as error:
            raise self.wrong(given[0], str(error)) from error

    def wrong(self, key: str, problem: str) -> ConfigError:
        return ConfigError(field=f"{self.place}, {key}", problem=f"{problem}.")

    def finish(self) -> None:
        """ConfigError if a key was never asked for."""
        for key in self._values:
            raise self.wrong(key, f"is no key here{near(key, self._known)}")
