"""Finding the string that ends a reply while its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens that the search reads again beside those the longest stop string may span, because a window of tokens may begin
# inside a character.
_MARGIN = 8


class StopFinder:
    """Looks for stop strings in a growing list of ids, reading each id a few times however long the list grows.

    Args:
        stops: the strings.
        decode: ids to text; incomplete UTF-8 becomes U+FFFD.

    Example:
        >>> finder = StopFinder(("de",), lambda ids: bytes(ids).decode(errors="replace"))
        >>> finder.find(list(b"abc")), finder.find(list(b"abcdef"))
        (None, (5, 'de'))
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.stops = stops
        self._decode = decode
        self._overlap = max((len(stop.encode()) for stop in stops), default=0) + _MARGIN
        self._num_read = 0

    def find(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """The number of ids after which a stop string is first complete, and that string; None where there is none yet.

        Args:
            ids: those of the call before, and more. Of strings complete at the same id, the one that begins first counts.
        """
        if not self.stops:
            return None
        start = max(self._num_read - self._overlap, 0)
        if self._found(ids[start:]):
            for end in range(self._num_read + 1, len(ids) + 1):
                if found := self._found(ids[start:end]):
                    return end, min(found)[1]
        self._num_read = len(ids)
        return None

    def _found(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        text = self._decode(ids)
        return [(text.index(stop), stop) for stop in self.stops if stop in text]
