"""Finds stop strings in a text that comes in pieces, and holds back what may still become one.

A match is what somebody who reads character by character would see first: the one that ends earliest; of several that
end at the same character, the longest, which is the one that starts first. So with the stops "abcd" and "bc", the text
"abcd" ends before "bc".

    text so far:   | given out ............... | held: the longest end of the text that some stop begins with |
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The search through one text.

    Args:
        stops: the stop strings, none of them empty. None at all: everything is given out at once.
        include_stop: whether the text includes the match.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        assert all(stops)
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first_chars = {stop[0] for stop in stops}
        self._include_stop = include_stop
        self._held = ""
        self.matched = ""
        """The stop string that was found; empty: none yet. After it, all text is dropped."""

    def push(self, text: str, counts: bool = True) -> str:
        """What can be given out now that `text` has come. A match that `text` completes is ignored unless it `counts`.

        What is given out never holds a character that a match may still take away.
        """
        if self.matched:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        given: list[str] = []
        for char in text:
            given.append(self._push_char(char, counts))
            if self.matched:
                break
        return "".join(given)

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _push_char(self, char: str, counts: bool) -> str:
        # A stop that ends here begins in `seen`: all of it but its last character was held.
        seen = self._held + char
        match = next((stop for stop in self._stops if seen.endswith(stop)), "") if counts else ""
        if match:
            self.matched, self._held = match, ""
            return seen if self._include_stop else seen[: -len(match)]
        begin = self._open_from(seen)
        self._held = seen[begin:]
        return seen[:begin]

    def _open_from(self, seen: str) -> int:
        """Where the longest end of `seen` begins that is the beginning, and not all, of a stop."""
        for begin, char in enumerate(seen):
            size = len(seen) - begin
            if char in self._first_chars and any(
                size < len(stop) and stop.startswith(seen[begin:]) for stop in self._stops
            ):
                return begin
        return len(seen)
