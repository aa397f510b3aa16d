"""A store of a limited size that forgets what was not used for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[float | None, ...]


class Kept(Generic[T]):
    """Values by key. The latest value stays, whatever its size.

    Args:
        limit: most bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[Key, tuple[T, int]] = OrderedDict()

    def get(self, key: Key) -> T | None:
        """Return the value of a key, which is then the latest; None: there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Key, value: T, size: int) -> None:
        """Keep a value of this size. Those that were not used for longest make room."""
        self._values[key] = value, size
        self._values.move_to_end(key)
        while len(self._values) > 1 and sum(size for _, size in self._values.values()) > self.limit:
            self._values.popitem(last=False)

    def drop(self, gone: Callable[[Key], bool]) -> None:
        """Forget the values of keys for which `gone` holds."""
        for key in [key for key in self._values if gone(key)]:
            del self._values[key]
