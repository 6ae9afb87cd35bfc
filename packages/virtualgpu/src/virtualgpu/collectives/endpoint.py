"""Connections between the processes of a program's ranks, for messages about the calls they make.

The ranks use the program's store only to find each other when a group is made. After that, NCCL
sends to its peers directly, and so do virtual GPUs. The other ranks can therefore continue when a
rank ends, even if its process kept the store.

Each process listens on a port of its own. It receives from each peer over one connection and sends
to each peer over another one. The messages of a process therefore reach its peers even if it ends
without reading theirs. No thread reads: the operating system keeps incoming messages until this
process looks. If a peer's operating system accepts no more bytes, a thread sends the rest, however
long this process computes.
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
FLUSHING = 10.0  # seconds for peers to accept the last messages of this process when it ends
# Seconds after which a waiting thread looks again, because another thread may have read the message
# that it waits for.
SLICE = 0.05
CHUNK = 1 << 16  # bytes read at once
QUEUED = 1024  # the most connections that wait until this process accepts them
_SIOCGIFADDR = 0x8915  # asks Linux for the address of a network interface (<linux/sockios.h>)

Message = dict[str, Any]


class Endpoint:
    """End of the connections to the peers of this process.

    Attributes:
        address: host, port and name, which peers need to connect.
        is_open: whether the connections are still there.
        ended: names of the peers that have ended or have destroyed all their groups.
        places: by global rank, the last collective that the rank reported to enter.
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
        """Register a receiver, and return the token to which peers address messages for it.

        `receive` is called with each message.
        """
        token = uuid.uuid4().hex
        self._receivers[token] = receive
        return token

    def remove_receiver(self, token: str) -> None:
        """Ignore messages for this token from now on. Without receivers, close all connections."""
        self._receivers.pop(token, None)
        if not self._receivers:
            self.close()

    def connect(self, address: list[Any]) -> str:
        """Connect to the peer at this address unless already connected. Return the peer's name.

        Raises ConnectionError if the peer's machine does not answer.
        """
        host, port, name = address
        with self._lock:
            if name not in self._outgoing and name not in self.ended:
                try:
                    connection = socket.create_connection((host, port), CONNECTING)
                except OSError as error:
                    where = f"a rank at {host}, port {port}"
                    advice = (
                        "If a machine has several networks, GLOO_SOCKET_IFNAME names the one to "
                        "use."
                    )
                    raise ConnectionError(
                        f"cannot connect to {where} ({error.strerror or error}). {advice}"
                    ) from error
                self._outgoing[name] = _Outgoing(connection)
                self.send(name, {"name": self.address[2]})
        return str(name)

    def send(self, name: str, message: Message) -> None:
        """Send a message to the peer of this name, without waiting.

        Messages to a peer that has ended are dropped.
        """
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
        """Send the waiting bytes of `outgoing` to the peer `name` until none are left.

        A thread runs this method. It sends as fast as the peer accepts the bytes.
        """
        while True:
            outgoing.wait_until_writable(SLICE)
            with self._lock:
                if self._outgoing.get(name) is outgoing:
                    self._flush(name)
                if self._outgoing.get(name) is not outgoing or not outgoing.waiting:
                    outgoing.has_sender = False
                    return

    def _flush(self, name: str) -> None:
        """Send as many waiting bytes to the peer `name` as it accepts now.

        A peer that is gone is forgotten.
        """
        try:
            self._outgoing[name].flush()
        except OSError:
            self._outgoing.pop(name).connection.close()

    def receive(self, seconds: float = 0.0) -> None:
        """Pass the messages that peers have sent to the receivers.

        If there are none yet, wait for up to `seconds`.
        """
        poll = select.poll()
        with self._lock:
            if not self.is_open:
                return
            poll.register(self._listener, select.POLLIN)
            for incoming in self._incoming.values():
                poll.register(incoming.connection, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return
        with self._lock:
            if not self.is_open:
                return
            self._accept()
            for number in list(self._incoming):
                self._read(number)

    def _accept(self) -> None:
        """Accept the connections that new peers have requested."""
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._incoming[connection.fileno()] = _Incoming(connection)

    def _read(self, number: int) -> None:
        """Handle the messages that have arrived on the connection with this file descriptor."""
        incoming = self._incoming[number]
        try:
            for message in incoming.read():
                self._take(incoming, message)
        except (ValueError, LookupError, TypeError):  # another program has connected to this port
            incoming.has_ended = True
        if incoming.has_ended:
            if incoming.name:
                self.ended.add(incoming.name)
            incoming.connection.close()
            del self._incoming[number]

    def _take(self, incoming: "_Incoming", message: Message) -> None:
        """Handle a message from the connection `incoming`.

        The first message of a peer is the peer's name. For a later message, note the sender's last
        call, and pass the message to its receiver.
        """
        if not incoming.name:
            incoming.name = message["name"]
            return
        self.places[message["rank"]] = message["place"]
        receive = self._receivers.get(message["to"])
        if receive is not None:
            receive(message)

    def wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Receive messages until `is_done()` is true.

        Returns False if that takes longer than `seconds`.
        """
        deadline = monotonic() + seconds
        self.receive()
        while not is_done():
            remaining = deadline - monotonic()
            if remaining <= 0:
                return False
            self.receive(min(remaining, SLICE))
        return True

    def close(self) -> None:
        """Send the remaining messages and close all connections.

        The peers learn that this process has left.
        """
        if not self.is_open:
            return
        deadline = monotonic() + FLUSHING
        for outgoing in self._outgoing.values():
            with suppress(OSError):
                outgoing.flush(max(0.0, deadline - monotonic()))
            with suppress(OSError):
                # Closing is not enough, because a forked process may have a copy of the connection.
                outgoing.connection.shutdown(socket.SHUT_WR)
        self.close_files()

    def close_files(self) -> None:
        """Close this process's files without telling the peers.

        A forked process closes its copies of the files in this way.
        """
        self.is_open = False
        self._listener.close()
        for outgoing in self._outgoing.values():
            outgoing.connection.close()
        for incoming in self._incoming.values():
            incoming.connection.close()
        self._outgoing.clear()
        self._incoming.clear()


class _Outgoing:
    """A connection for sending to a peer.

    waiting: bytes that the peer's operating system does not accept yet
    has_sender: whether a thread sends these bytes
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.connection = connection
        self.waiting = bytearray()
        self.has_sender = False

    def add(self, message: Message) -> None:
        """Append a message to the waiting bytes."""
        self.waiting += json.dumps(message).encode() + b"\n"

    def flush(self, seconds: float = 0.0) -> None:
        """Send the waiting bytes. If the peer accepts no more, wait for it for up to `seconds`.

        Raises OSError if the peer is gone.
        """
        deadline = monotonic() + seconds
        while self.waiting:
            try:
                del self.waiting[: self.connection.send(self.waiting)]
            except BlockingIOError:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return
                self.wait_until_writable(remaining)

    def wait_until_writable(self, seconds: float) -> None:
        """Wait until the peer accepts more bytes, for up to `seconds`."""
        if self.connection.fileno() < 0:  # closed
            return
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        poll.poll(seconds * 1000)


class _Incoming:
    """A connection for receiving from a peer. The peer's first message is its name."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.name = ""
        self.has_ended = False
        self._rest = b""  # the beginning of a message that has not arrived as a whole

    def read(self) -> list[Message]:
        """Return the messages that have arrived. Set `has_ended` if the peer has closed."""
        received = [self._rest]
        try:
            while not self.has_ended:
                data = self.connection.recv(CHUNK)
                received.append(data)
                self.has_ended = not data
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        *lines, self._rest = b"".join(received).split(b"\n")
        return [json.loads(line) for line in lines]


_endpoints: "weakref.WeakSet[Endpoint]" = weakref.WeakSet()
_current: Endpoint | None = None


def current_endpoint(store: Any = None) -> Endpoint:
    """Return this process's endpoint, which the first call creates.

    The endpoint listens on the network over which this machine reaches the store.
    """
    global _current
    if _current is None or not _current.is_open:
        _current = Endpoint(own_host(store))
    return _current


def own_host(store: Any) -> str:
    """Return the address at which peers reach this machine.

    It is the address of the interface that GLOO_SOCKET_IFNAME names, which gloo uses too. Without
    that, it is an address on the network over which this machine reaches the store's machine.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = None
    if interface:
        address = _interface_address(interface)
    if address:
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
    """Return the IPv4 address of a network interface, or None if there is none."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return None


def _close(reference: "weakref.ref[Endpoint]") -> None:
    """Close the endpoint that `reference` refers to, if it still exists, when the process ends."""
    endpoint = reference()
    if endpoint is not None:
        endpoint.close()


def _forget() -> None:
    """Close the connections in a forked child, because they belong to its parent."""
    global _current
    _current = None
    for endpoint in list(_endpoints):
        endpoint.close_files()
        endpoint._lock = RLock()  # another thread of the parent may have held the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
