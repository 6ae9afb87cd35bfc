"""Connections between the processes of a program's ranks, over which the ranks tell each other what
they call.

The program's store only introduces the ranks when a group is made. After that, NCCL sends to its
peers directly, and so do virtual GPUs. A rank that ends takes nothing along that others still need,
not even if its process kept the store.

Each process listens on a port of its own. It hears each peer over one connection and speaks to each
peer over another one, so whatever a process has said reaches its peers even if the process ends
without reading what they said. No thread reads: the kernel keeps what peers send until this process
looks. If a peer's kernel takes no more, a thread sends the rest, however long this process computes.
"""

import json
import os
import select
import socket
import struct
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from threading import RLock, Thread
from time import monotonic  # the real clock: Python's `time` may tell the model's time later
from typing import Any

CONNECTING = 60.0  # seconds for a peer's machine to answer
FLUSHING = 10.0  # seconds for peers to take what this process still has to say when it ends
SLICE = 0.05  # seconds between two looks of a thread that waits: another thread may have read what it waits for
CHUNK = 1 << 16  # bytes read at once
QUEUED = 1024  # connections that wait until this process looks
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the address of a network interface

Message = dict[str, Any]


class Endpoint:
    """This process's end of the connections to its peers.

    Attributes:
        address: host, port and name, which peers need to connect.
        is_open: whether the connections are still there.
        ended: names of the peers whose processes have ended, or that have destroyed all their groups.
        places: by global rank, what each rank was heard to enter last.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=QUEUED)
        self._listener.setblocking(False)
        self.address = [host, self._listener.getsockname()[1], uuid.uuid4().hex]
        self.ended: set[str] = set()
        self.places: dict[int, str] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[str, _Outgoing] = {}
        self._receivers: dict[str, Callable[[Message], None]] = {}
        self._lock = RLock()
        self.is_open = True
        Finalize(self, _close, (weakref.ref(self),), exitpriority=0)
        _endpoints.add(self)

    def add_receiver(self, receive: Callable[[Message], None]) -> str:
        """Return a new token. `receive` gets the messages that peers send to this token."""
        token = uuid.uuid4().hex
        self._receivers[token] = receive
        return token

    def remove_receiver(self, token: str) -> None:
        """Ignore messages for this token from now on. Without receivers, close all connections."""
        self._receivers.pop(token, None)
        if not self._receivers:
            self.close()

    def connect(self, address: list[Any]) -> str:
        """Connect to a peer, unless this process has done so before. Returns the peer's name."""
        host, port, name = address
        with self._lock:
            if name not in self._outgoing and name not in self.ended:
                try:
                    connection = socket.create_connection((host, port), CONNECTING)
                except OSError as error:
                    where = f"a rank at {host}, port {port}"
                    advice = "If a machine has several networks, GLOO_SOCKET_IFNAME names the one to use."
                    raise ConnectionError(
                        f"cannot connect to {where} ({error.strerror or error}). {advice}"
                    ) from error
                self._outgoing[name] = _Outgoing(connection)
                self.send(name, {"name": self.address[2]})
        return str(name)

    def send(self, name: str, message: Message) -> None:
        """Send a message to the peer of this name. A peer that has ended does not need it."""
        with self._lock:
            outgoing = self._outgoing.get(name)
            if outgoing is None:
                return
            outgoing.add(message)
            self._flush(name)
            if outgoing.waiting and not outgoing.has_sender:
                outgoing.has_sender = True
                Thread(target=self._send_rest, args=(name, outgoing), daemon=True).start()

    def _send_rest(self, name: str, outgoing: "_Outgoing") -> None:
        """Send the waiting bytes as the peer's kernel takes them. End when none are left."""
        while True:
            outgoing.wait_for_room(SLICE)
            with self._lock:
                if self._outgoing.get(name) is outgoing:
                    self._flush(name)
                if self._outgoing.get(name) is not outgoing or not outgoing.waiting:
                    outgoing.has_sender = False
                    return

    def _flush(self, name: str) -> None:
        try:
            self._outgoing[name].flush()
        except OSError:
            self._outgoing.pop(name).connection.close()

    def receive(self, seconds: float = 0.0) -> None:
        """Take in what peers have sent. If there is nothing yet, wait for it up to `seconds`."""
        poll = select.poll()
        with self._lock:
            if not self.is_open:
                return
            for file in (
                self._listener,
                *(incoming.connection for incoming in self._incoming.values()),
            ):
                poll.register(file, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return
        with self._lock:
            if not self.is_open:
                return
            self._accept()
            for number in list(self._incoming):
                self._read(number)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._incoming[connection.fileno()] = _Incoming(connection)

    def _read(self, number: int) -> None:
        incoming = self._incoming[number]
        try:
            for message in incoming.read():
                self._take(incoming, message)
        except (ValueError, LookupError, TypeError):  # no rank, but a stranger that tries this port
            incoming.has_ended = True
        if incoming.has_ended:
            if incoming.name:
                self.ended.add(incoming.name)
            incoming.connection.close()
            del self._incoming[number]

    def _take(self, incoming: "_Incoming", message: Message) -> None:
        if not incoming.name:
            incoming.name = message["name"]
            return
        self.places[message["rank"]] = message["place"]
        receive = self._receivers.get(message["to"])
        if receive is not None:
            receive(message)

    def wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Receive until `is_done()`. Returns False if that takes longer than `seconds`."""
        deadline = monotonic() + seconds
        self.receive()
        while not is_done():
            remaining = deadline - monotonic()
            if remaining <= 0:
                return False
            self.receive(min(remaining, SLICE))
        return True

    def close(self) -> None:
        """Send what is still to be sent, then close all connections. Peers learn that this process has left."""
        if not self.is_open:
            return
        deadline = monotonic() + FLUSHING
        for outgoing in self._outgoing.values():
            with suppress(OSError):
                outgoing.flush(max(0.0, deadline - monotonic()))
            with suppress(OSError):
                outgoing.connection.shutdown(
                    socket.SHUT_WR
                )  # a forked process may have a copy of the connection
        self.close_files()

    def close_files(self) -> None:
        """Close this process's files without telling the peers. A forked process closes its copies."""
        self.is_open = False
        self._listener.close()
        for outgoing in self._outgoing.values():
            outgoing.connection.close()
        for incoming in self._incoming.values():
            incoming.connection.close()
        self._outgoing.clear()
        self._incoming.clear()


class _Outgoing:
    """A connection to a peer, with the bytes that the peer's kernel does not take yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.connection = connection
        self.waiting = bytearray()
        self.has_sender = False  # whether a thread sends the waiting bytes

    def add(self, message: Message) -> None:
        self.waiting += json.dumps(message).encode() + b"\n"

    def flush(self, seconds: float = 0.0) -> None:
        """Send the waiting bytes. If the peer's kernel takes no more, wait for it up to `seconds`. Raises OSError if the peer has gone."""
        deadline = monotonic() + seconds
        while self.waiting:
            try:
                del self.waiting[: self.connection.send(self.waiting)]
            except BlockingIOError:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return
                self.wait_for_room(remaining)

    def wait_for_room(self, seconds: float) -> None:
        """Wait until the peer's kernel takes more bytes, up to `seconds`."""
        if self.connection.fileno() < 0:  # closed
            return
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        poll.poll(seconds * 1000)


class _Incoming:
    """A connection from a peer. The peer's first message is its name."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.name, self.has_ended = connection, "", False
        self._rest = b""

    def read(self) -> list[Message]:
        """Return the messages that have arrived, and note whether the peer has closed the connection."""
        received = [self._rest]
        try:
            while data := self.connection.recv(CHUNK):
                received.append(data)
            self.has_ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        *lines, self._rest = b"".join(received).split(b"\n")
        return [json.loads(line) for line in lines]


_endpoints: "weakref.WeakSet[Endpoint]" = weakref.WeakSet()
_current: Endpoint | None = None


def current_endpoint(store: Any = None) -> Endpoint:
    """This process's endpoint. If there is none yet, make one on the network by which this machine reaches the store."""
    global _current
    if _current is None or not _current.is_open:
        _current = Endpoint(own_host(store))
    return _current


def own_host(store: Any) -> str:
    """The address under which peers reach this machine: on the interface that GLOO_SOCKET_IFNAME names, as for gloo, or on the network by
    which this machine reaches the store's."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface and (address := _interface_address(interface)):
        return address
    host = getattr(store, "host", None)
    try:
        there = socket.getaddrinfo(host or socket.gethostname(), 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*there[:2]) as probe:
            probe.connect(there[4])  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _interface_address(interface: str) -> str | None:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return None


def _close(endpoint: "weakref.ref[Endpoint]") -> None:
    if (found := endpoint()) is not None:
        found.close()


def _forget() -> None:
    """Leave the connections to the process that this one was forked from."""
    global _current
    _current = None
    for endpoint in list(_endpoints):
        endpoint.close_files()
        endpoint._lock = RLock()  # another thread may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
