"""`nvidia-smi` for virtual GPUs: a program that asks the process with the machine, and prints as NVIDIA's does (driver 580).

This file is both sides. A process with a machine runs a `Server`: it listens on a local socket, and puts a folder with a program named
nvidia-smi first on the PATH. That program is this file, run alone: so it imports nothing but Python's standard library.
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


# The process with the machine


class Server:
    """Serves nvidia-smi programs while a machine is in place: it sends `report()`, as JSON, to each that connects."""

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        import atexit
        import tempfile
        import threading
        import zlib

        self._report = report
        self._process = os.getpid()
        atexit.register(self.close)
        # Computers of a cluster may share the folder, and none can tell whether another one's socket still answers.
        prefix = f"labkit-smi-{zlib.crc32(socket.gethostname().encode()):08x}-"
        _remove_abandoned(prefix)
        self.folder = tempfile.mkdtemp(prefix=prefix)
        self.address = os.path.join(self.folder, "socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"{self.address}~")
        self._socket.listen()
        os.rename(f"{self.address}~", self.address)  # by this name it never refuses: another process would remove it
        self._thread = threading.Thread(target=self._serve, name="nvidia-smi", daemon=True)
        self._thread.start()
        program = os.path.join(self.folder, "nvidia-smi")
        with open(program, "w") as file:
            file.write(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{os.path.abspath(__file__)}" "$@"\n')
        os.chmod(program, 0o700)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    connection.sendall(json.dumps(self._report()).encode())
                except OSError:
                    continue  # the program did not wait

    def environment(self) -> dict[str, str]:
        """The variables that let this process, and its children, find the program."""
        return {"PATH": os.pathsep.join((self.folder, os.environ.get("PATH", os.defpath))), ADDRESS: self.address}

    def close(self) -> None:
        """Stop listening and remove the folder. A second call does nothing, nor does one in a child that was forked."""
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


def _remove_abandoned(prefix: str) -> None:
    """Remove this user's folders of processes that were killed: their sockets refuse connections."""
    import shutil
    import tempfile

    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry for entry in entries if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False)]
    for entry in found:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            line.setblocking(False)
            try:
                line.connect(os.path.join(entry.path, "socket"))
            except ConnectionRefusedError:
                shutil.rmtree(entry.path, ignore_errors=True)


# The program


class MistakeError(Exception):
    """What the program says before it ends with a status other than 0."""

    def __init__(self, words: str, status: int = 1) -> None:
        super().__init__(words)
        self.status = status


def main(arguments: list[str]) -> int:
    try:
        print(answer(arguments, ask(os.environ.get(ADDRESS, ""))), end="")
    except MistakeError as mistake:
        print(mistake)
        return mistake.status
    return 0


def ask(address: str) -> dict[str, Any]:
    """The report of the machine behind the socket. Raises MistakeError when there is none any more."""
    text = b""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(address)
            while part := line.recv(1 << 16):
                text += part
    except OSError:
        raise MistakeError("NVIDIA-SMI has failed: the process with the virtual GPUs does not answer any more.", 9) from None
    return json.loads(text)


def answer(arguments: list[str], report: dict[str, Any]) -> str:
    """What nvidia-smi prints for these arguments. Raises MistakeError for arguments that it refuses, and for those not served here."""
    options, words = _parse(arguments)
    gpus = _chosen(report["gpus"], options)
    if words == ["topo"] and "-m" in options:
        return topology(report, gpus)
    if words or "-m" in options:
        raise _not_served(" ".join(arguments))
    if "-L" in options or "--list-gpus" in options:
        return "".join(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n" for gpu in gpus)
    for query, fields, rows in (("--query-gpu", GPU_FIELDS, gpus), ("--query-compute-apps", APP_FIELDS, list(_apps(gpus)))):
        if query in options:
            return csv(options[query], options.get("--format", ""), fields, rows, report)
    return table(report, gpus)


def _parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    words: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            words.append(argument)
        elif name in ("-i", "--id", "--query-gpu", "--query-compute-apps", "--format"):
            options["-i" if name == "--id" else name] = value if equals else next(waiting, "")
        elif argument in ("-L", "--list-gpus", "-m"):
            options[argument] = ""
        else:
            raise _not_served(argument)
    return options, words


def _not_served(what: str) -> MistakeError:
    return MistakeError(
        f"nvidia-smi {what} is not served for virtual GPUs. Served: the table, -L, -i, --query-gpu, --query-compute-apps, topo -m."
    )


def _chosen(gpus: list[dict], options: dict[str, str]) -> list[dict]:
    if "-i" not in options:
        return gpus
    names = options["-i"].split(",")
    found = [gpu for gpu in gpus if {str(gpu["index"]), gpu["uuid"], gpu["bus_id"]} & set(names)]
    if not found:
        raise MistakeError("No devices were found", 6)
    return found


# --query-gpu and --query-compute-apps

Field = Callable[[dict, dict], tuple[str, str]]  # (GPU or process, report) -> figure and unit


def _figure(key: str, unit: str = "", divisor: float = 1, digits: int = 0) -> Field:
    return lambda row, report: (f"{row[key] / divisor:.{digits}f}", unit)


def _text(key: str) -> Field:
    return lambda row, report: (str(row[key]), "")


def _constant(text: str) -> Field:
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
    "gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "gpu_serial": "serial", "clocks.sm": "clocks.current.sm",
    "clocks.gr": "clocks.current.graphics", "clocks.mem": "clocks.current.memory", "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory", "used_memory": "used_gpu_memory", "name": "process_name",
}  # fmt: skip


def _apps(gpus: list[dict]) -> Iterator[dict]:
    for gpu in gpus:
        for pid, program, held in gpu["processes"]:
            yield gpu | {"pid": pid, "program": program, "held": held}


def csv(names: str, format: str, fields: dict[str, Field], rows: list[dict], report: dict[str, Any]) -> str:
    """The fields of each row, as `--format=csv[,noheader][,nounits]` asks."""
    styles = format.split(",")
    if "csv" not in styles:
        raise MistakeError("\"--format=\" switch is missing. Please specify output format. Run 'nvidia-smi -h' for more information.", 2)
    if unknown := set(styles) - {"csv", "noheader", "nounits"}:
        raise MistakeError(f'Error: Unknown format option "{min(unknown)}".', 2)
    columns = []
    for name in (name.strip() for name in names.split(",")):
        known = name if name in fields else ALIASES.get(name, name)
        if known not in fields:
            raise MistakeError(f'Field "{name}" is not a valid field to query.\n', 2)
        columns.append((known, fields[known]))
    lines = []
    if "noheader" not in styles:
        lines.append(", ".join(_head(name, field, report, "nounits" in styles) for name, field in columns))
    for row in rows:
        cells = (field(row, report) for _, field in columns)
        lines.append(", ".join(f"{text} {unit}" if unit and "nounits" not in styles else text for text, unit in cells))
    return "".join(f"{line}\n" for line in lines)


def _head(name: str, field: Field, report: dict[str, Any], bare: bool) -> str:
    example = report["gpus"][0] | {"pid": 0, "program": "", "held": 0}
    unit = field(example, report)[1]
    return f"{name} [{unit}]" if unit else name


# The table


def table(report: dict[str, Any], gpus: list[dict]) -> str:
    lines = [time.strftime("%a %b %e %H:%M:%S %Y       "), _rule("-")]
    version = f"NVIDIA-SMI {report['driver']:<22} Driver Version: {report['driver']:<14} CUDA Version: {report['cuda']:<8}"
    lines += [f"| {version} |", _columns("-", "+")]
    lines += [
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        _columns("=", "|"),
    ]
    for gpu in gpus:
        power = f"{gpu['watts']:.0f}W / {gpu['watts_limit']:>4.0f}W"
        memory = f"{gpu['used'] / MIB:.0f}MiB / {gpu['total'] / MIB:>6.0f}MiB"
        lines += [
            f"| {gpu['index']:>3}  {gpu['name'][:27]:<27} {'On':>5}  | {gpu['bus_id']:>18} {'Off':>3} | {0:>20} |",
            f"| N/A  {gpu['celsius']:>3}C    P0    {power:>20} | {memory:>22} | {100 * gpu['busy']:>6.0f}% {'Default':>12} |",
            f"|{'':41}|{'':24}| {'Disabled' if gpu['nvlinks'] else 'N/A':>20} |",  # MIG: the models with NVLink have it
            _columns("-", "+"),
        ]
    return "".join(f"{line}\n" for line in (*lines, "", *_processes(gpus)))


def _rule(character: str, end: str = "+") -> str:
    return end + character * (ROW - 2) + end


def _columns(character: str, end: str) -> str:
    return end + "+".join(character * width for width in (41, 24, 22)) + end


def _processes(gpus: list[dict]) -> Iterator[str]:
    yield _rule("-")
    yield f"| {'Processes:':<87} |"
    yield "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |"
    yield "|        ID   ID                                                               Usage      |"
    yield _rule("=", "|")
    rows = list(_apps(gpus))
    if not rows:
        yield f"|  {'No running processes found':<86} |"
    for row in rows:
        held = f"{row['held'] / MIB:.0f}MiB"
        yield f"| {row['index']:>4}   N/A  N/A {row['pid']:>16} {'C':>6}   {row['program'][-31:]:<31} {held:>14} |"
    yield _rule("-")


# topo -m


def topology(report: dict[str, Any], gpus: list[dict]) -> str:
    """How the GPUs are joined: NVLinks where the model has them, PCIe through the host otherwise."""
    names = [f"GPU{gpu['index']}" for gpu in gpus]
    lines = ["\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for name, gpu in zip(names, gpus, strict=True):
        link = f"NV{gpu['nvlinks']}" if gpu["nvlinks"] else "PHB"
        cells = [" X " if other == name else link for other in names]
        lines.append("\t".join([name, *cells, f"0-{report['processors'] - 1}", "0", "", "N/A"]))
    return "".join(f"{line}\n" for line in (*lines, "", "Legend:", "", *LEGEND))


LEGEND = (
    "  X    = Self",
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)",
    "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node",
    "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)",
    "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)",
    "  PIX  = Connection traversing at most a single PCIe bridge",
    "  NV#  = Connection traversing a bonded set of # NVLinks",
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
