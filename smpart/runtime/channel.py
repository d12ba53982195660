"""Messages between the engine and a lane's worker: pickled objects over a stream socket."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<Q")
_READ_BYTES = 1 << 18


def pack(message: Any) -> bytes:
    """A message as `Channel.post` takes it. Raises what pickling it raises."""
    return pickle.dumps(message, protocol=5)


class Channel:
    """One end of a two-way stream of messages, of any size.

    The worker's end blocks (`receive`, `flush`). The engine's end never does: what the socket does not take is kept,
    and goes out with the next `pump`.

    Attributes:
        closed: the other end is gone; no more messages come.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        self._sock = sock
        self._blocking = blocking
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.closed = False

    def fileno(self) -> int:
        """Descriptor to poll."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._outgoing)

    def send(self, message: Any) -> None:
        """Queue a message and send what the socket takes (a blocking channel: all of it)."""
        self.post(pack(message))

    def post(self, packed: bytes) -> None:
        """`send` for a message that was packed before."""
        self._outgoing += _HEADER.pack(len(packed))
        self._outgoing += packed
        self._flush()

    def receive(self) -> Any:
        """The next message; blocks. Raises `EOFError` when the other end is gone."""
        while (message := self._next()) is _NOTHING:
            if not self._read():
                raise EOFError
        return message

    def pump(self) -> list[Any]:
        """Send and receive what can be without blocking; the messages that are complete."""
        self._flush()
        while not self.closed and self._read():
            pass
        messages = []
        while (message := self._next()) is not _NOTHING:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Hang up. The other end notices even if a copy of this socket lives on in a forked process."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = self._sock.send(self._outgoing, socket.MSG_NOSIGNAL)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the other end is gone: reading will say so, after what it still had to say
            self._outgoing.clear()

    def _read(self) -> bool:
        """Take in some bytes; False when there are none now, or none any more."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.closed = not data
        self._incoming += data
        return bool(data)

    def _next(self) -> Any:
        if len(self._incoming) < _HEADER.size:
            return _NOTHING
        (length,) = _HEADER.unpack_from(self._incoming)
        end = _HEADER.size + length
        if len(self._incoming) < end:
            return _NOTHING
        body = bytes(self._incoming[_HEADER.size : end])
        del self._incoming[:end]
        return pickle.loads(body)


_NOTHING = object()
