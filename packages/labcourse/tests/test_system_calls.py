"""The filter of system calls, put in place in a process of its own."""

import subprocess
import sys

import pytest

from labcourse import backends, system_calls

pytestmark = pytest.mark.slow

ASK = """
import errno, mmap, socket, tempfile
from labcourse import system_calls

a, b = socket.socketpair()
before = a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
assert system_calls.forbid(shared=False)
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
    socket.socket(family, socket.SOCK_DGRAM).close()
for family, kind in ((40, socket.SOCK_STREAM), (38, socket.SOCK_SEQPACKET), (17, socket.SOCK_RAW)):
    try:
        socket.socket(family, kind)
    except OSError as error:
        assert error.errno == errno.EAFNOSUPPORT
    else:
        raise AssertionError(family)
mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)[0] = 1
with tempfile.TemporaryFile() as file:
    file.write(bytes(4096))
    file.flush()
    mmap.mmap(file.fileno(), 4096)[0] = 1
try:
    mmap.mmap(-1, 4096)
except PermissionError:
    pass
else:
    raise AssertionError("shared memory that is in no file")
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * before)
assert a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, b"\\1" + bytes(15))
assert a.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)[0] == 1
with socket.create_server(("127.0.0.1", 0)) as server:
    with socket.create_connection(server.getsockname()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such filters")
def test_buffers_families_of_sockets_and_shared_memory_are_limited():
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_a_system_without_the_filter_is_refused(bubblewrap, monkeypatch):
    monkeypatch.setattr(backends, "HAS_FILTER", "raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="bubblewrap cannot refuse system calls here"):
        backends.best(1 << 20)


def test_an_unknown_machine_has_no_filter(monkeypatch):
    monkeypatch.setattr(system_calls.platform, "machine", lambda: "vax")
    assert not system_calls.forbid()
