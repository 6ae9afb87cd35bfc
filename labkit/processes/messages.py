"""Messages between processes: JSON after its length, so that nothing but plain data ever arrives."""

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

_HEAD = struct.Struct(">I")
# Of this module: a notebook may replace `json.dumps` and `json.loads` by functions with other settings.
_ENCODER, _DECODER = json.JSONEncoder(), json.JSONDecoder()


class MessageError(Exception):
    """The bytes that arrived are not a message."""


def written(message: Any) -> str:
    """Return the message as JSON, with ASCII letters only."""
    return _ENCODER.encode(message)


def packed(message: Any) -> bytes:
    text = written(message).encode()
    return _HEAD.pack(len(text)) + text


def unpacked(text: bytes | bytearray) -> Any:
    """The message. Raises MessageError for anything but JSON: too deep, not UTF-8, numbers of thousands of digits."""
    try:
        return _DECODER.decode(text.decode())
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON ({type(error).__name__})") from None


def send(connection: socket.socket, /, **message: Any) -> None:
    """Send a message, unless the connection is closed, here or at the other end."""
    with contextlib.suppress(OSError):
        connection.sendall(packed(message))


def receive(
    connection: socket.socket, recv: Callable[[socket.socket, int], bytes] = socket.socket.recv
) -> Any:
    """Wait for one message. Raises EOFError when the other end has closed."""
    return unpacked(
        _exactly(connection, _HEAD.unpack(_exactly(connection, _HEAD.size, recv))[0], recv)
    )


def _exactly(
    connection: socket.socket, count: int, recv: Callable[[socket.socket, int], bytes]
) -> bytes:
    received = bytearray()
    while len(received) < count:
        data = recv(connection, min(count - len(received), 1 << 20))
        if not data:
            raise EOFError
        received += data
    return bytes(received)


class Inbox:
    """Bytes as they come in, until they make a message of at most `largest` bytes."""

    def __init__(self, largest: int = 1 << 32) -> None:
        self._largest, self._received = largest, bytearray()

    @property
    def empty(self) -> bool:
        return not self._received

    def add(self, data: bytes) -> None:
        """Raises MessageError as soon as a message turns out to be too long."""
        self._received += data
        if (
            len(self._received) >= _HEAD.size
            and _HEAD.unpack_from(self._received)[0] > self._largest
        ):
            raise MessageError("too long")

    def take(self) -> Any:
        """The first message, or None when it is not complete. Raises MessageError."""
        text = self.take_text()
        return None if text is None else unpacked(text)

    def take_text(self) -> bytes | None:
        """The bytes of the first message, or None when it is not complete."""
        if len(self._received) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        text = bytes(self._received[_HEAD.size : end])
        del self._received[:end]
        return text

    def take_rest(self) -> bytes:
        """All bytes that are left: what follows the last message is something else."""
        rest = bytes(self._received)
        self._received.clear()
        return rest
