"""Turns one request's tokens into text as they come, and watches for its stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"


class StreamDetokenizer:
    """Text in pieces whose concatenation is ``tokenizer.decode(tokens, skip_special_tokens=True)``.

    A piece never ends inside a character: text is held back while its last bytes are not a complete one, and while
    its end could be the beginning of a stop string. Each token costs a decode of the few tokens since the last
    piece, not of the whole answer.

    Args:
        stop: strings that end the text; it is cut before the first of them.

    Attributes:
        stopped: the stop string that ended the text, or None.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        # Tokens from `_context` on are decoded; those before `_read` are already text. Keeping some read tokens in
        # front gives decoders that look at their neighbours (leading spaces, joined bytes) the same view each time.
        self._context = 0
        self._read = 0
        self._held = ""

    def push(self, token: int) -> str:
        """Add one token; the text that is certain now, often empty. After a stop string it is always empty."""
        if self.stopped is not None:
            return ""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(known) or text.endswith(_UNFINISHED) or not text.startswith(known):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return self._emit(text[len(known) :])

    def finish(self) -> str:
        """No more tokens will come: the text still held back, incomplete characters included."""
        if self.stopped is not None:
            return ""
        known = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        self._context = self._read = len(self._tokens)
        piece = self._emit(text[len(known) :])
        if self.stopped is None:
            piece, self._held = piece + self._held, ""
        return piece

    def _emit(self, new: str) -> str:
        """Pass on held and new text, up to a stop string or to what could become one."""
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            end, self.stopped = min(found)
            self._held = ""
            return text[:end]
        keep = _overlap(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string.

    >>> _overlap("see the EN", ("END", "\\n\\n"))
    2
    """
    longest = max((len(stop) - 1 for stop in stops), default=0)
    ends = range(min(longest, len(text)), 0, -1)
    return next((n for n in ends if any(stop.startswith(text[-n:]) for stop in stops)), 0)
