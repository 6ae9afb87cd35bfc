"""Seccomp filter that refuses system calls to a submission and to all processes that it starts.

The filter refuses calls that reach another process (its limits, priority, memory or files), calls
that make namespaces or mounts, and calls that hold memory which no limit counts: files without a
name, System V shared memory and queues, and keys.

Libraries ask for a larger send buffer of a socket, so this call is not refused. It succeeds and
changes nothing.

Sockets of other families than `FAMILIES` are refused. Some, such as those to the host of a virtual
machine, belong to no network namespace.
"""

import ctypes
import errno
import platform
import struct
import sys

# The numbers of refused system calls, on x86-64 and on ARM64.
FORBIDDEN = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "quotactl": (179, 60),
}
# The numbers of system calls that are allowed only for the caller's own process, and the index of
# the argument that names a process. This argument has to be 0.
OWN_PROCESS = {
    "prlimit64": (302, 261, 0),
    "sched_setparam": (142, 118, 0),
    "sched_setscheduler": (144, 119, 0),
    "sched_setaffinity": (203, 122, 0),
    "sched_setattr": (314, 274, 0),
    "setpriority": (141, 140, 1),
    "ioprio_set": (251, 30, 1),
}
SOCKETS = ((41, 198), (53, 199))  # socket and socketpair
FAMILIES = (1, 2, 10, 16)  # sockets between processes, IPv4, IPv6, and the list of interfaces
MMAP = (9, 222)
SHARED_MEMORY = 0x21  # MAP_SHARED and MAP_ANONYMOUS: memory that counts for no process
SETSOCKOPT = (54, 208)
SOCKET_LEVEL, SEND_BUFFER = 1, 7  # its second and third arguments
CLONE, CLONE3 = (56, 220), 435
NEW_NAMESPACES = 0x7E020080  # flags of clone
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
X32 = 0x40000000  # numbers from here on are a second interface to the same calls

# Instructions of the filter
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN, AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # what it returns. A refusal has the error number added.
IGNORE = REFUSE  # with error number 0, the call returns 0 and does nothing
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # arguments of prctl

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class _Program(ctypes.Structure):
    """The C structure `sock_fprog`, which passes a filter to the kernel."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def forbid(shared: bool = True) -> bool:
    """Install the filter in this process. It cannot be removed.

    Args:
        shared: whether processes may share memory that is in no file. Refuse it if no control group
            counts memory, because such memory counts for no process that has unmapped it.

    Returns:
        False if the system has no such filter, or if this module does not know its numbers.
    """
    if sys.platform != "linux" or sys.byteorder != "little":
        return False
    if platform.machine() not in ARCHITECTURES:
        return False
    instructions = _filter(*ARCHITECTURES[platform.machine()], shared)
    library = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(instructions) // 8, instructions)
    if library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    return bool(library.prctl(SECCOMP, FILTER, ctypes.byref(program), 0, 0) == 0)


def _filter(architecture: int, column: int, shared: bool) -> bytes:
    """Return the filter's instructions, of 8 bytes each.

    Args:
        architecture: the kernel's number for the processor architecture.
        column: the index of this architecture in the pairs of numbers above.
    """
    refuse, absent = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, refuse), (LOAD, 0, 0, 0)]
    code += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, refuse)]
    for numbers in FORBIDDEN.values():
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, refuse)]
    # The flags of clone3 are in memory, where a filter cannot read them. If clone3 is absent, the
    # C library uses clone.
    code += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, absent)]
    code += _if_argument(CLONE[column], 0, (ANY_BIT, 0, 1, NEW_NAMESPACES), refuse)
    for *own, argument in OWN_PROCESS.values():
        code += _if_argument(own[column], argument, (EQUAL, 1, 0, 0), refuse)
    for numbers in SOCKETS:
        code += _if_family(numbers[column], REFUSE | errno.EAFNOSUPPORT)
    if not shared:
        flags = 16 + 8 * 3  # the offset of mmap's fourth argument
        code += [(EQUAL, 0, 5, MMAP[column]), (LOAD, 0, 0, flags), (AND, 0, 0, SHARED_MEMORY)]
        code += [(EQUAL, 0, 1, SHARED_MEMORY), (RETURN, 0, 0, refuse), (RETURN, 0, 0, ALLOW)]
    code += [(EQUAL, 0, 6, SETSOCKOPT[column]), (LOAD, 0, 0, 24), (EQUAL, 0, 3, SOCKET_LEVEL)]
    code += [(LOAD, 0, 0, 32), (EQUAL, 0, 1, SEND_BUFFER), (RETURN, 0, 0, IGNORE)]
    code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _if_family(number: int, refuse: int) -> list[Instruction]:
    """Return instructions that refuse a system call unless its first argument is in `FAMILIES`.

    `number` is the number of the call, and `refuse` the filter's verdict on it.
    """
    count = len(FAMILIES)
    tests = [(EQUAL, count - place, 0, family) for place, family in enumerate(FAMILIES)]
    called = [(LOAD, 0, 0, 16), *tests, (RETURN, 0, 0, refuse), (RETURN, 0, 0, ALLOW)]
    return [(EQUAL, 0, len(called), number), *called]


def _if_argument(number: int, argument: int, test: Instruction, refuse: int) -> list[Instruction]:
    """Return instructions that refuse a system call unless one of its arguments passes a test.

    `number` is the number of the call, `argument` the index of the argument, and `refuse` the
    filter's verdict. `test` passes if it jumps over one instruction, which is the refusal.
    """
    return [
        (EQUAL, 0, 4, number),
        (LOAD, 0, 0, 16 + 8 * argument),
        test,
        (RETURN, 0, 0, refuse),
        (RETURN, 0, 0, ALLOW),
    ]
