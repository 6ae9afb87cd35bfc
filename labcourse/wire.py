"""Messages between the grader and what runs behind a wall: JSON after its length, so that nothing but plain data ever arrives."""

import json
import socket
import struct
from typing import Any

LARGEST = 16 << 20  # bytes of one message
_HEAD = struct.Struct(">I")


class MessageError(Exception):
    """What arrived is no message."""


def packed(message: Any) -> bytes:
    text = json.dumps(message, ensure_ascii=True).encode()
    return _HEAD.pack(len(text)) + text


def unpacked(text: bytes | bytearray) -> Any:
    """The message. Raises MessageError for anything but JSON: too deep, not UTF-8, numbers of thousands of digits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON ({type(error).__name__})") from None


class Inbox:
    """Bytes as they come in, until they make a message."""

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def empty(self) -> bool:
        return not self._held

    def add(self, data: bytes) -> None:
        self._held += data
        if len(self._held) >= _HEAD.size and _HEAD.unpack_from(self._held)[0] > LARGEST:
            raise MessageError("too long")

    def take(self) -> Any:
        """The first message, or None when it is not complete. Raises MessageError."""
        if len(self._held) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(self._held)[0]
        if len(self._held) < end:
            return None
        text = self._held[_HEAD.size : end]
        del self._held[:end]
        return unpacked(text)


def receive(line: socket.socket, receive_into: Any = socket.socket.recv) -> Any:
    """Wait for one message. Raises EOFError when the other end has closed."""
    text = _exactly(line, _HEAD.unpack(_exactly(line, _HEAD.size, receive_into))[0], receive_into)
    return unpacked(text)


def _exactly(line: socket.socket, count: int, receive_into: Any) -> bytes:
    held = bytearray()
    while len(held) < count:
        data = receive_into(line, min(count - len(held), 1 << 20))
        if not data:
            raise EOFError
        held += data
    return bytes(held)
