"""Attacks: none stops a grading, reads a file of the course, writes outside the sandbox or harms the next submission."""

import json
import os

import pytest

pytestmark = pytest.mark.slow

RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"
SECRET = "the seed of this course"
START = "import ctypes, glob, os, resource, signal, socket, subprocess, sys, threading, time\nSECRET = {secret!r}\nFOLDER = os.path.dirname(SECRET)\n"
SAY = "def say(path): raise ValueError(open(path).read())\n"
TRY = "\n".join(
    ["def tried(function, *arguments):", "    try: return function(*arguments)", "    except (OSError, ValueError): return None\n"]
)
FORK = "def forks(count, work):\n    for _ in range(count):\n        if os.fork() == 0:\n            try: work()\n            finally: os._exit(0)\n"
FDS = "fds = [int(name) for name in os.listdir('/proc/self/fd') if int(name) > 2]\n"

# Reach for files of the course, which lie at SECRET on the machine that grades.
READING = {
    "its path": "say(SECRET)",
    "the root of process 1": "say('/proc/1/root' + SECRET)",
    "the root of its own process": "say('/proc/self/root' + SECRET)",
    "a path upwards": "say('../' * 30 + SECRET)",
    "a symbolic link": "os.symlink(SECRET, 'link')\nsay('link')",
    "a hard link": "os.link(SECRET, 'link')\nsay('link')",
    "the folders of open files": FDS + "for fd in fds:\n    tried(os.fchdir, fd)\n    tried(lambda: say('secret.txt'))",
    "a file handle": "handle = ctypes.create_string_buffer(b'\\x80' + bytes(200))\n"
    "c = ctypes.CDLL(None)\nassert c.syscall(303, -100, SECRET.encode(), handle, handle, 0) == 0\n"
    "say(f'/proc/self/fd/{c.syscall(304, -100, handle, 0)}')",
    "a search of the whole disk": "names = [name for place, _, names in os.walk('/') for name in names if 'secret' in name]\n"
    "raise ValueError([name for name in names if name == os.path.basename(SECRET)], 'found')",
    "another namespace": "raise ValueError(subprocess.run(['unshare', '-Urm', 'cat', SECRET], capture_output=True, text=True))",
    "a sandbox within": "raise ValueError(subprocess.run(['bwrap', '--bind', '/', '/', 'cat', SECRET], capture_output=True, text=True))",
    "another user": "raise ValueError(subprocess.run(['su', '-c', f'cat {SECRET}'], capture_output=True, text=True, stdin=0))",
    "the environment of process 1": "say('/proc/1/environ')",
    "the disk's device": "for name in glob.glob('/dev/[shvn]*d*'): open(name, 'rb').read(1)\nos.mknod('disk', 0o60600, os.makedev(8, 0))",
    "open files by a message": "a, b = socket.socketpair()\nfor fd in range(3, 64): tried(socket.send_fds, a, [b'x'], [fd])\n"
    "for fd in os.listdir('/proc/self/fd'): tried(lambda: say(f'/proc/self/fd/{fd}/../secret.txt'))",
}
# Write outside of the sandbox.
WRITING = {
    "the folder of the course": "os.makedirs(FOLDER, exist_ok=True)\nopen(SECRET, 'w').write('mine')",
    "the root": "open('/mine', 'w')",
    "the kit": "open(labkit.__file__, 'a').write('x')",
    "PyTorch's folder": "open(os.path.dirname(torch.__file__) + '/mine.pth', 'w')",
    "the system's programs": "os.symlink('/bin/false', '/usr/bin/mine')",
    "a mount that can be written": "assert ctypes.CDLL(None).mount(b'none', b'/', b'', 32 | 4096, None) == 0\nopen('/mine', 'w')",
    "the kernel's settings": "for name in ('kernel/core_pattern', 'vm/overcommit_memory'): tried(lambda: open(f'/proc/sys/{name}', 'w').write('1'))",
    "control groups": "for name in ('/sys/fs/cgroup/cgroup.procs', '/sys/kernel/mm'): open(name, 'w').write('1')",
    "process 1": "for name in ('mem', 'comm', 'oom_score_adj', 'attr/current'): tried(lambda: open(f'/proc/1/{name}', 'w').write('1'))",
    "other machines' sockets": "for name in ('/run/docker.sock', '/var/run/dbus/system_bus_socket', '\\0/tmp/.X11-unix/X0'):\n"
    "    with socket.socket(socket.AF_UNIX) as s: tried(s.connect, name)",
    "the network": "for address in (('127.0.0.1', 8786), ('10.0.0.1', 22)):\n"
    "    with socket.socket() as s: s.settimeout(1); tried(s.connect, address)",
}
# Stop the grading, use more than the limits allow, or leave something for the next submission.
STOPPING = {
    "process 1 held": "for s in (signal.SIGSTOP, signal.SIGKILL, signal.SIGSEGV): tried(os.kill, 1, s)",
    "its own group held": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.killpg(0, signal.SIGTERM)",
    "another program in its place": "os.execv('/bin/sleep', ['sleep', '1000'])",
    "a message without end": FDS + "for fd in fds: tried(os.write, fd, b'\\x7f\\xff\\xff\\xff' + b'[' * 1000)",
    "a message that is nested": FDS + "for fd in fds: tried(os.write, fd, (9000).to_bytes(4, 'big') + b'[' * 9000)",
    "the connection handed on": FDS + FORK + "forks(1, lambda: time.sleep(1000))\nfor fd in fds: tried(os.close, fd)",
    "every call to json changed": "import json\njson.dumps = lambda *a, **k: '[' * 100",
    "a reply with every kind of number": "import labkit.checks.checking as c\n"
    "c.observe = lambda *a: {'observed': [float('nan'), 1e999, 10**4000, '\\ud800', '\\x1b[2J'], 'left': ''}",
    "a reply that is large": "import labkit.checks.checking as c\nc.observe = lambda *a: {'observed': [[]] * 5_000_000, 'left': ''}",
    "a reply that never comes": "import labkit.checks.checking as c\nc.observe = lambda *a: time.sleep(0) or iter(int, 1)",
    "an error without end": "class E(Exception):\n    def __str__(self): return 'x' * (1 << 28)\nraise E",
    "an error whose text raises": "class E(Exception):\n    def __str__(self): raise E\n    __repr__ = __str__\nraise E",
    "output that commands a terminal": "print('\\x1b]0;mine\\x07\\x1b[2J', '\\ud800')\nos.write(1, bytes(range(256)))",
    "folders without end": "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "folders that nobody may read": "for n in range(50): os.mkdir(f'd{n}'); open(f'd{n}/x', 'w'); os.chmod(f'd{n}', 0)",
    "files with strange names": "for n in range(1, 256): tried(lambda: open(b'/tmp/' + bytes([n]) + b'\\n', 'w'))",
    "a hundred thousand files": "for n in range(100_000): open(f'f{n}', 'w').close()",
    "files in all its folders": "for name in ('/tmp', '/dev/shm', '.'): tried(lambda: open(name + '/big', 'wb').write(bytes(1 << 28)))",
    "threads without end": "for _ in range(3000):\n    try: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    "    except RuntimeError: break",
    "programs that outlive their parents": FORK + "forks(5, lambda: (os.setsid(), forks(1, lambda: time.sleep(1000))))",
    "dead processes": FORK + "forks(40, lambda: None)\ntime.sleep(1)",
    "sockets full of bytes": FORK + "def fill():\n    held = []\n    for _ in range(120):\n        a, b = socket.socketpair()\n"
    "        for s in (a, b):\n            s.setsockopt(1, 7, 1 << 26); s.setblocking(False)\n"
    "            tried(lambda: [s.send(bytes(1 << 16)) for _ in range(200)])\n        held += [a, b]\n    time.sleep(1000)\n"
    "forks(41, fill)\ntime.sleep(20)",
    "sockets on the loopback": "a = socket.create_server(('127.0.0.1', 0))\nheld = []\nfor _ in range(100):\n"
    "    s = socket.create_connection(a.getsockname()); s.setblocking(False)\n    held += [s, a.accept()[0]]\n"
    "    tried(lambda: [s.send(bytes(1 << 20)) for _ in range(100)])",
    "pipes full of bytes": "import fcntl\nheld = []\nfor _ in range(120):\n    r, w = os.pipe(); os.set_blocking(w, False)\n"
    "    tried(fcntl.fcntl, w, 1031, 1 << 20)\n    tried(os.write, w, bytes(1 << 20))\n    held.append((r, w))",
    "memory that is locked": "import mmap\nm = mmap.mmap(-1, 1 << 29)\nctypes.CDLL(None).mlockall(3)\nm.write(bytes(1 << 29))",
    "the stack's end": "sys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()",
    "an end that takes for ever": "import atexit\natexit.register(time.sleep, 1000)\nclass D:\n    def __del__(self): time.sleep(1000)\nd = D()\nsys.exit()",
    "a picture of a billion points": "import struct, zlib\nfrom IPython.display import display\n"
    "png = b'\\x89PNG\\r\\n\\x1a\\n' + b'\\0\\0\\0\\rIHDR' + struct.pack('>II', 1 << 30, 1 << 30) + bytes(5000)\n"
    "display({'image/png': png}, raw=True)\ndisplay({'image/png': '<script>'}, raw=True)",
    "magics for the system": "%cd /\n%env PATH=/\n!kill -9 1 -1\n%system rm -rf /\n%writefile /mine\nx",
}
# What reaches beyond one's own process, or holds memory that no limit counts; the answer itself is right.
REACHING = {
    "limits of the parent": "import resource; resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0))",
    "more limits of the parent": "import resource\nfor i in range(16):\n    try: resource.prlimit(1, i, (1, 1))\n    except OSError: pass",
    "the parent's priority": "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "everybody's priority": "import os; os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "the parent's processors": "import os; os.sched_setaffinity(1, {0})",
    "the parent's scheduling": "import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "the parent's memory": "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
    "a namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "shared memory that stays": "import ctypes\nassert ctypes.CDLL(None).shmget(7, 1 << 20, 0o1666) >= 0",
    "a key that stays": "import ctypes\nassert ctypes.CDLL(None).syscall(248, b'user', b'mine', b'x', 1, -4) > 0",
    "memory in a file without a name": "import os\nfd = os.memfd_create('x')\nfor _ in range(64): os.write(fd, bytes(32 << 20))",
    "memory in files": "for i in range(64): open(f'/dev/shm/{i}', 'wb').write(bytes(32 << 20))",
    "the way to be ended first": "open('/proc/1/oom_score_adj', 'w').write('1000')",
    "signals": "import os\nfor s in (19, 10, 14):\n    try: os.kill(1, s)\n    except OSError: pass",
}
ATTACKS = READING | WRITING | STOPPING


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder of the course on this machine, and what is in it."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_reaches_nothing(name, tried, outside):
    cell = START.format(secret=str(outside / "secret.txt")) + SAY + TRY + ATTACKS[name]
    examined = tried("00.1", cell, RIGHT)
    json.dumps([examined.exercises, examined.cell_errors, examined.remarks], allow_nan=False).encode()
    assert SECRET not in repr(examined) and "'secret.txt'" not in repr(examined.cell_errors)
    assert [path.name for path in outside.iterdir()] == ["secret.txt"]
    assert (outside / "secret.txt").read_text() == SECRET and not os.path.exists("/mine")
    assert examined.points in (None, 0, 1)
    after = tried("00.1", "import os\nassert os.listdir('.') == os.listdir('/dev/shm') == []", RIGHT)
    assert (after.status, after.points, after.remarks) == ("graded", 1, [])


@pytest.mark.parametrize("name", REACHING)
def test_nothing_reaches_beyond_the_process(name, tried):
    for cell in (REACHING[name], "pass"):
        examined = tried("00.1", cell, RIGHT)
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])
