"""Messages between processes.

A message is JSON, with its length before it. So a message contains only plain data.
"""

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

_HEAD = struct.Struct(">I")  # the length of the JSON, in bytes
# A notebook may replace `json.dumps` and `json.loads`, so this module has its own.
_ENCODER, _DECODER = json.JSONEncoder(), json.JSONDecoder()

Receive = Callable[[socket.socket, int], bytes]


class MessageError(Exception):
    """Error of bytes that are not a message."""


def written(message: Any) -> str:
    """Return a message as JSON text, which has only ASCII characters."""
    return _ENCODER.encode(message)


def packed(message: Any) -> bytes:
    """Return the bytes of a message, which begin with its length."""
    text = written(message).encode()
    return _HEAD.pack(len(text)) + text


def unpacked(text: bytes | bytearray) -> Any:
    """Return the message that the JSON contains.

    Raises MessageError for bytes that are not UTF-8 or not JSON, for JSON that is nested too
    deeply, and for numbers with thousands of digits.
    """
    try:
        return _DECODER.decode(text.decode())
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON ({type(error).__name__})") from None


def send(connection: socket.socket, /, **message: Any) -> None:
    """Send a message. Do nothing if one of the two ends is closed."""
    with contextlib.suppress(OSError):
        connection.sendall(packed(message))


def receive(connection: socket.socket, recv: Receive = socket.socket.recv) -> Any:
    """Wait for a message and return it.

    Raises EOFError if the other end is closed, and MessageError if the bytes are not JSON.

    Args:
        connection: where the message comes from.
        recv: the function that receives bytes.
    """
    head = _received(connection, _HEAD.size, recv)
    return unpacked(_received(connection, _HEAD.unpack(head)[0], recv))


def _received(connection: socket.socket, count: int, recv: Receive) -> bytes:
    """Return exactly `count` bytes from a connection.

    `recv` is the function that receives bytes.
    """
    received = bytearray()
    while len(received) < count:
        data = recv(connection, min(count - len(received), 1 << 20))
        if not data:
            raise EOFError
        received += data
    return bytes(received)


class Inbox:
    """Bytes that have come in and are not yet taken as messages.

    Args:
        largest: the most bytes that a message may have.
    """

    def __init__(self, largest: int = 1 << 32) -> None:
        self._largest, self._received = largest, bytearray()

    @property
    def empty(self) -> bool:
        """Whether all bytes have been taken."""
        return not self._received

    def add(self, data: bytes) -> None:
        """Add bytes. Raise MessageError as soon as they announce a message that is too long."""
        self._received += data
        length = self._length()
        if length is not None and length > self._largest:
            raise MessageError("too long")

    def take(self) -> Any:
        """Return the first message, or None if it is not complete. Raise MessageError."""
        text = self.take_text()
        return None if text is None else unpacked(text)

    def take_text(self) -> bytes | None:
        """Return the JSON of the first message, or None if the message is not complete."""
        length = self._length()
        if length is None or len(self._received) < _HEAD.size + length:
            return None
        end = _HEAD.size + length
        text = bytes(self._received[_HEAD.size : end])
        del self._received[:end]
        return text

    def take_rest(self) -> bytes:
        """Return all bytes that are left, which are not a message."""
        rest = bytes(self._received)
        self._received.clear()
        return rest

    def _length(self) -> int | None:
        """Return the number of bytes in the first message, or None if it is not known yet."""
        if len(self._received) < _HEAD.size:
            return None
        length: int = _HEAD.unpack_from(self._received)[0]
        return length
