"""`nvidia-smi` for virtual GPUs: a program that asks the process with the machine.

It prints as NVIDIA's does (driver 580). This file is both sides. A process with a machine runs a
`Server`: it listens on a local socket, and puts a folder with a program named nvidia-smi first on
the PATH. That program is this file, run alone: so it imports nothing but Python's standard library.

`labkit top` asks the same servers. A process with real GPUs has one for it, without the program.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

ADDRESS = "LABKIT_NVIDIA_SMI"  # the environment variable that names the socket
MIB = 1 << 20
ROW = 91  # characters
NOT_KNOWN = "[N/A]"


# The process with the machine.


class Server:
    """A server for nvidia-smi programs, while a machine is in place.

    It sends `report()`, as JSON, to each program that connects.
    """

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        """Listen for nvidia-smi programs until `close` is called or the process ends.

        `report` returns the machine's present state as a dictionary.
        """
        import atexit
        import tempfile
        import threading

        self._report = report
        self._process = os.getpid()
        atexit.register(self.close)
        remove_abandoned()
        self.folder = tempfile.mkdtemp(prefix=folder_prefix())
        self.address = os.path.join(self.folder, "socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"{self.address}~")
        self._socket.listen()
        # By this name it never refuses: another process would remove it.
        os.rename(f"{self.address}~", self.address)
        self._thread = threading.Thread(target=self._serve, name="nvidia-smi", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Send the report to each program that connects, until the socket is closed."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                if _has_gone(connection):
                    continue  # it only looked whether anybody listens (`remove_abandoned`)
                try:
                    connection.sendall(json.dumps(self._report()).encode())
                except OSError:
                    continue  # the program did not wait

    def environment(self) -> dict[str, str]:
        """Write the program nvidia-smi to the server's folder.

        Returns the environment variables with which child processes find the program.
        """
        program = os.path.join(self.folder, "nvidia-smi")
        with open(program, "w") as file:
            command = f'"{sys.executable}" -I -S "{os.path.abspath(__file__)}"'
            file.write(f'#!/bin/sh\nexec {command} "$@"\n')
        os.chmod(program, 0o700)
        path = os.pathsep.join((self.folder, os.environ.get("PATH", os.defpath)))
        return {"PATH": path, ADDRESS: self.address}

    def close(self) -> None:
        """Stop listening and remove the server's folder.

        A second call does nothing. In a forked child, a call does nothing either.
        """
        import atexit
        import shutil

        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join(timeout=1)
        shutil.rmtree(self.folder, ignore_errors=True)


def _has_gone(connection: socket.socket) -> bool:
    """Return whether the other side has closed the connection."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def folder_prefix() -> str:
    """Return the prefix of the names of the servers' folders on this computer.

    It names the computer, because a cluster's computers may share the folder of temporary files
    and cannot tell whether another computer's socket still answers.
    """
    import zlib

    return f"labkit-smi-{zlib.crc32(socket.gethostname().encode()):08x}-"


def addresses(*jobs: str) -> list[str]:
    """Return the addresses of this user's servers on this computer, also of ended servers.

    Ranks of `labkit torchrun` have their servers in the folder of their job. `jobs` are the
    folders that contain such job folders.
    """
    import glob
    import tempfile

    patterns = [glob.escape(tempfile.gettempdir())]
    patterns += [os.path.join(glob.escape(folder), "labkit-*") for folder in jobs]
    found = []
    for pattern in patterns:
        for address in glob.glob(os.path.join(pattern, f"{folder_prefix()}*", "socket")):
            with contextlib.suppress(FileNotFoundError):  # the process has just ended
                if os.lstat(address).st_uid == os.getuid():
                    found.append(address)
    return found


def remove_abandoned() -> None:
    """Remove this user's folders that belong to killed processes.

    Their sockets refuse connections.
    """
    import shutil
    import tempfile

    prefix = folder_prefix()
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry for entry in entries if entry.name.startswith(prefix)]
    found = [entry for entry in found if entry.is_dir(follow_symlinks=False)]
    for entry in found:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            line.setblocking(False)
            try:
                line.connect(os.path.join(entry.path, "socket"))
            except ConnectionRefusedError:
                shutil.rmtree(entry.path, ignore_errors=True)


# The program.


class MistakeError(Exception):
    """A message that the program prints before it ends with a status other than 0."""

    def __init__(self, words: str, status: int = 1) -> None:
        """Keep the text of the message (`words`) and the exit status."""
        super().__init__(words)
        self.status = status


def main(arguments: list[str]) -> int:
    """Print what nvidia-smi prints for these arguments, and return the program's status."""
    try:
        print(answer(arguments, ask(os.environ.get(ADDRESS, ""))), end="")
    except MistakeError as mistake:
        print(mistake)
        return mistake.status
    return 0


def ask(address: str, timeout: float | None = None) -> dict[str, Any]:
    """Return the report of the machine behind the socket.

    Raises MistakeError if there is no such machine any more, and TimeoutError if the process has
    not answered after `timeout` seconds.
    """
    text = b""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(timeout)
            line.connect(address)
            part = line.recv(1 << 16)
            while part:
                text += part
                part = line.recv(1 << 16)
        return json.loads(text)
    except TimeoutError:
        raise
    except (OSError, ValueError):  # it has ended, perhaps while it sent the report
        raise MistakeError(
            "NVIDIA-SMI has failed: the process with the virtual GPUs does not answer any more.", 9
        ) from None


def answer(arguments: list[str], report: dict[str, Any]) -> str:
    """Return what nvidia-smi prints for these arguments.

    Raises:
        MistakeError: nvidia-smi refuses the arguments, or virtual GPUs have no answer to them.
    """
    options, words = _parse(arguments)
    gpus = _chosen(report["gpus"], options)
    if words == ["topo"] and "-m" in options:
        return topology(report, gpus)
    if words or "-m" in options:
        raise _not_supported(" ".join(arguments))
    if "-L" in options or "--list-gpus" in options:
        lines = (f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n" for gpu in gpus)
        return "".join(lines)
    format = options.get("--format", "")
    if "--query-gpu" in options:
        return csv(options["--query-gpu"], format, GPU_FIELDS, gpus, report)
    if "--query-compute-apps" in options:
        return csv(options["--query-compute-apps"], format, APP_FIELDS, list(_apps(gpus)), report)
    return table(report, gpus)


def _parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split command-line arguments into options with their values, and other words.

    Raises MistakeError for an option that virtual GPUs do not support.
    """
    options: dict[str, str] = {}
    words: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            words.append(argument)
        elif name in ("-i", "--id", "--query-gpu", "--query-compute-apps", "--format"):
            if not equals:
                value = next(waiting, "")
            options["-i" if name == "--id" else name] = value
        elif argument in ("-L", "--list-gpus", "-m"):
            options[argument] = ""
        else:
            raise _not_supported(argument)
    return options, words


def _not_supported(what: str) -> MistakeError:
    """Return the error for arguments that virtual GPUs do not support."""
    return MistakeError(
        f"nvidia-smi {what} is not supported for virtual GPUs. "
        "Supported: the table, -L, -i, --query-gpu, --query-compute-apps, topo -m."
    )


def _chosen(gpus: list[dict], options: dict[str, str]) -> list[dict]:
    """Return the GPUs that the option -i names by number, UUID or bus. Without -i, return all."""
    if "-i" not in options:
        return gpus
    names = options["-i"].split(",")
    found = [gpu for gpu in gpus if {str(gpu["index"]), gpu["uuid"], gpu["bus_id"]} & set(names)]
    if not found:
        raise MistakeError("No devices were found", 6)
    return found


# --query-gpu and --query-compute-apps.

Field = Callable[[dict, dict], tuple[str, str]]  # (GPU or process, report) -> figure and unit


def _figure(key: str, unit: str = "", divisor: float = 1, digits: int = 0) -> Field:
    """Return a field for the number `key` of the report, divided by `divisor`.

    `digits` is the number of decimal places, and `unit` the unit for the heading.
    """
    return lambda row, report: (f"{row[key] / divisor:.{digits}f}", unit)


def _text(key: str) -> Field:
    """Return a field for the text `key` of the report."""
    return lambda row, report: (str(row[key]), "")


def _constant(text: str) -> Field:
    """Return a field that has the same text for every GPU."""
    return lambda row, report: (text, "")


_DEPRECATED = "[Requested functionality has been deprecated]"
GPU_FIELDS: dict[str, Field] = {
    "timestamp": lambda row, report: (time.strftime("%Y/%m/%d %H:%M:%S.000"), ""),
    "driver_version": lambda row, report: (report["driver"], ""),
    "count": lambda row, report: (str(len(report["gpus"])), ""),
    "name": _text("name"),
    "index": _text("index"),
    "uuid": _text("uuid"),
    "pci.bus_id": _text("bus_id"),
    "serial": _constant(NOT_KNOWN),
    "compute_cap": lambda row, report: (".".join(map(str, row["capability"])), ""),
    "memory.total": _figure("total", "MiB", MIB),
    "memory.used": _figure("used", "MiB", MIB),
    "memory.free": lambda row, report: (f"{(row['total'] - row['used']) / MIB:.0f}", "MiB"),
    "memory.reserved": lambda row, report: ("0", "MiB"),
    "utilization.gpu": _figure("busy", "%", 0.01),
    "utilization.memory": lambda row, report: ("0", "%"),
    "temperature.gpu": _figure("celsius"),
    "power.draw": _figure("watts", "W", digits=2),
    "power.limit": _figure("watts_limit", "W", digits=2),
    "enforced.power.limit": _figure("watts_limit", "W", digits=2),
    "clocks.current.sm": _figure("sm_clock", "MHz"),
    "clocks.current.graphics": _figure("sm_clock", "MHz"),
    "clocks.current.memory": _figure("memory_clock", "MHz"),
    "clocks.max.sm": _figure("sm_clock", "MHz"),
    "clocks.max.graphics": _figure("sm_clock", "MHz"),
    "clocks.max.memory": _figure("memory_clock", "MHz"),
    "pstate": _constant("P0"),
    "persistence_mode": _constant("Enabled"),
    "display_active": _constant("Disabled"),
    "display_mode": _constant(_DEPRECATED),
    "compute_mode": _constant("Default"),
    "fan.speed": _constant(NOT_KNOWN),
    "mig.mode.current": _constant(NOT_KNOWN),
}
APP_FIELDS: dict[str, Field] = {
    "pid": _text("pid"),
    "process_name": _text("program"),
    "used_gpu_memory": _figure("held", "MiB", MIB),
    "gpu_name": _text("name"),
    "gpu_uuid": _text("uuid"),
    "gpu_bus_id": _text("bus_id"),
}
# Other names of the same fields, and the units that a header shows.
ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "gpu_serial": "serial",
    "clocks.sm": "clocks.current.sm",
    "clocks.gr": "clocks.current.graphics",
    "clocks.mem": "clocks.current.memory",
    "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory",
    "used_memory": "used_gpu_memory",
    "name": "process_name",
}


def _apps(gpus: list[dict]) -> Iterator[dict]:
    """Yield a row for each process on a GPU, with the data of both."""
    for gpu in gpus:
        for pid, program, held in gpu["processes"]:
            yield gpu | {"pid": pid, "program": program, "held": held}


def csv(
    names: str, format: str, fields: dict[str, Field], rows: list[dict], report: dict[str, Any]
) -> str:
    """Return rows of fields in the format of `--format=csv[,noheader][,nounits]`.

    `names` are the requested fields, separated by commas. `fields` has all fields by name. Raises
    MistakeError, with nvidia-smi's words, if the format or a field is unknown.
    """
    styles = format.split(",")
    if "csv" not in styles:
        raise MistakeError(
            '"--format=" switch is missing. Please specify output format. '
            "Run 'nvidia-smi -h' for more information.",
            2,
        )
    unknown = set(styles) - {"csv", "noheader", "nounits"}
    if unknown:
        raise MistakeError(f'Error: Unknown format option "{min(unknown)}".', 2)
    without_units = "nounits" in styles
    columns = []
    for name in (name.strip() for name in names.split(",")):
        known = name if name in fields else ALIASES.get(name, name)
        if known not in fields:
            raise MistakeError(f'Field "{name}" is not a valid field to query.\n', 2)
        columns.append((known, fields[known]))
    lines = []
    if "noheader" not in styles:
        heads = (_head(name, field, report, without_units) for name, field in columns)
        lines.append(", ".join(heads))
    for row in rows:
        cells = []
        for _, field in columns:
            text, unit = field(row, report)
            if unit and not without_units:
                text = f"{text} {unit}"
            cells.append(text)
        lines.append(", ".join(cells))
    return "".join(f"{line}\n" for line in lines)


def _head(name: str, field: Field, report: dict[str, Any], bare: bool) -> str:
    """Return the heading of a column of CSV: the field's name, and its unit in brackets.

    A field without a unit has only its name.
    """
    example = report["gpus"][0] | {"pid": 0, "program": "", "held": 0}
    unit = field(example, report)[1]
    if unit:
        return f"{name} [{unit}]"
    return name


# The table.

GPU_HEAD = (
    "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
    "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
    "|                                         |                        |               MIG M. |",
)
PROCESS_HEAD = (
    "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
    "|        ID   ID                                                               Usage      |",
)


def table(report: dict[str, Any], gpus: list[dict]) -> str:
    """Return the table that nvidia-smi prints without arguments."""
    lines = [time.strftime("%a %b %e %H:%M:%S %Y       "), _rule("-")]
    driver, cuda = report["driver"], report["cuda"]
    version = f"NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: {cuda:<8}"
    lines += [f"| {version} |", _columns("-", "+")]
    lines += [*GPU_HEAD, _columns("=", "|")]
    for gpu in gpus:
        name, bus_id = gpu["name"][:27], gpu["bus_id"]
        power = f"{gpu['watts']:.0f}W / {gpu['watts_limit']:>4.0f}W"
        memory = f"{gpu['used'] / MIB:.0f}MiB / {gpu['total'] / MIB:>6.0f}MiB"
        busy = f"{100 * gpu['busy']:>6.0f}% {'Default':>12}"
        mig = "Disabled" if gpu["nvlinks"] else "N/A"  # the models with NVLink have it
        lines += [
            f"| {gpu['index']:>3}  {name:<27} {'On':>5}  | {bus_id:>18} {'Off':>3} | {0:>20} |",
            f"| N/A  {gpu['celsius']:>3}C    P0    {power:>20} | {memory:>22} | {busy} |",
            f"|{'':41}|{'':24}| {mig:>20} |",
            _columns("-", "+"),
        ]
    return "".join(f"{line}\n" for line in (*lines, "", *_processes(gpus)))


def _rule(character: str, end: str = "+") -> str:
    """Return a line of `character` across the whole table, which ends with `end`."""
    return end + character * (ROW - 2) + end


def _columns(character: str, end: str) -> str:
    """Return a horizontal line across the three columns of the table.

    It is made of `character`, with `end` at both ends and a plus between the columns.
    """
    return end + "+".join(character * width for width in (41, 24, 22)) + end


def _processes(gpus: list[dict]) -> Iterator[str]:
    """Yield the lines of the table that lists the processes on the GPUs."""
    yield _rule("-")
    yield f"| {'Processes:':<87} |"
    yield from PROCESS_HEAD
    yield _rule("=", "|")
    rows = list(_apps(gpus))
    if not rows:
        yield f"|  {'No running processes found':<86} |"
    for row in rows:
        index, pid, program = row["index"], row["pid"], row["program"][-31:]
        held = f"{row['held'] / MIB:.0f}MiB"
        yield f"| {index:>4}   N/A  N/A {pid:>16} {'C':>6}   {program:<31} {held:>14} |"
    yield _rule("-")


# topo -m.


def topology(report: dict[str, Any], gpus: list[dict]) -> str:
    """Return a matrix that says how the GPUs are connected: by NVLinks or by PCIe."""
    names = [f"GPU{gpu['index']}" for gpu in gpus]
    heads = "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\t\x1b[4m{heads}\x1b[0m"]
    for name, gpu in zip(names, gpus, strict=True):
        link = f"NV{gpu['nvlinks']}" if gpu["nvlinks"] else "PHB"
        cells = [link] * len(names)
        cells[names.index(name)] = " X "
        lines.append("\t".join([name, *cells, f"0-{report['processors'] - 1}", "0", "", "N/A"]))
    return "".join(f"{line}\n" for line in (*lines, "", "Legend:", "", *LEGEND))


LEGEND = (
    "  X    = Self",
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes "
    "(e.g., QPI/UPI)",
    "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges "
    "within a NUMA node",
    "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)",
    "  PXB  = Connection traversing multiple PCIe bridges "
    "(without traversing the PCIe Host Bridge)",
    "  PIX  = Connection traversing at most a single PCIe bridge",
    "  NV#  = Connection traversing a bonded set of # NVLinks",
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
