"""Run a job: start torchrun's agents and their ranks, listen to them, and end them.

Each rank connects twice to a socket in the job's folder. One connection has its output, the other
has the report of how it ended. So the job knows which rank failed first.
"""

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from labkit.processes import forkserver, messages
from labkit.processes.exit_status import is_whole_stack
from labkit.processes.forkserver import Forked
from labkit.processes.messages import Inbox
from labkit.processes.supervision import (
    CHUNK,
    KILLING,
    LOOK,
    KeptOutput,
    is_running,
    kill_job,
    rank_environment,
)
from labkit.ranks.printing import RankPrinter
from labkit.ranks.rank_process import RankProcess
from virtualgpu.machines import with_maker

STARTING = 300.0  # seconds for torchrun to import torch and start the ranks
ENDING = 10.0  # seconds for torchrun to end the other ranks after the last failure
STOPPING = 1.0  # seconds for ranks to end after SIGTERM
LOOKING = 5.0  # seconds for ranks to write their stacks, on a busy machine

_AGENT = os.path.join(os.path.dirname(__file__), "agent.py")

# Takes a message of a rank or an agent, or None when the connection has closed.
Hear = Callable[[dict[str, Any] | None], None]


class TorchrunJob:
    """One call of torchrun for the request in a folder.

    Attributes:
        request: what to run, as `cell_request` returns it.
        expected: the number of ranks on all nodes.
        processes: the processes of ranks, in the order of their start.
        failed: the processes that failed, in the order of their failures.
        refused: why torchrun did not start the ranks, as a kind and a sentence, or None.
        devices: "cuda" or "cpu", or "" until the first agent has chosen.
        agent_output: what torchrun itself printed.
        late: whether the ranks took too long.
        stacks: the stack of ranks, by rank. They are ranks that took too long, and ranks for which
            another one waited in vain.
    """

    def __init__(self, folder: str, request: dict[str, Any], printer: RankPrinter) -> None:
        self._folder, self.request, self._printer = folder, request, printer
        self.expected = request["ranks_of_node"] * request["nodes"]
        self.processes: list[RankProcess] = []
        self.failed: list[RankProcess] = []
        self.refused: tuple[str, str] | None = None
        self.devices = ""
        self.agent_output = KeptOutput()
        self.late = False
        self.stacks: dict[int, str] = {}
        self._attempts: list[str] = []  # the names of the attempts so far
        # By process. torchrun may report the exit code of a rank that the job has not met yet.
        self._exit_codes: dict[int, int] = {}
        self._timeout = self._deadline = math.inf
        self._agents: list[Forked | subprocess.Popen[bytes]] = []
        self._to_agents: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()  # each file's data is its reading function
        self._open_files: set[socket.socket | IO[bytes]] = set()
        self._ended: list[RankProcess] = []  # processes that ended since the last look

    def run(self, timeout: float | None) -> None:
        """Start the ranks, and listen until they end or have run for `timeout` seconds.

        No process is left in any case.
        """
        self._timeout = math.inf if timeout is None else timeout
        self._deadline = time.monotonic() + STARTING
        try:
            self._start()
            self.late = not self._listen()
            if self.late:
                self.stacks = self._stacks()
        finally:
            self._end_all()

    def attempts(self) -> list[list[RankProcess]]:
        """Return the processes of each attempt, as a list for each in the order of the ranks."""
        attempts: list[list[RankProcess]] = [[] for _ in self._attempts]
        for process in sorted(self.processes, key=lambda process: process.rank):
            attempts[process.attempt].append(process)
        return attempts

    def trace_file(self, process: RankProcess) -> Path:
        """Return the file in which a process leaves its trace."""
        return Path(self._folder, f"trace-{process.pid}.npz")

    def first_failed(self, attempt: int) -> RankProcess | None:
        """Return the rank that made an attempt fail, or None if no rank failed.

        A rank that lost another rank, or that torchrun ended, failed after that rank.
        """
        failed = [process for process in self.failed if process.attempt == attempt]

        def failed_later(process: RankProcess) -> bool:
            if process.lost_another or process.exit_code == -signal.SIGTERM:
                return True
            # torchrun reports no exit code of the ranks that it ended.
            return process.report is None and process.exit_code is None

        return min(failed, key=failed_later, default=None)

    # Starting

    def _start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        self._register(listener, partial(self._accept, listener))
        listener.bind(os.path.join(self._folder, "ranks"))
        listener.listen(256)
        for node in range(self.request["nodes"]):
            self._start_agent(node)
        messages.send(self._to_agents[0], port=0)  # the first agent chooses a port

    def _start_agent(self, node: int) -> None:
        connection, theirs = socket.socketpair()
        self._to_agents.append(connection)
        read = partial(self._read_messages, connection, Inbox(), self._hear_agent)
        self._register(connection, read)
        reading, writing = os.pipe()
        pipe = open(reading, "rb", buffering=0)  # noqa: SIM115
        self._register(pipe, partial(self._read_agent_output, pipe))
        with theirs, os.fdopen(writing, "wb"):
            fileno = theirs.fileno()
            agent = forkserver.popen(
                [_AGENT, self._folder, str(fileno), str(node)],
                rank_environment(self._folder),
                output=writing,
                pass_fds=[fileno],
                with_server=True,
            )
            self._agents.append(agent)

    def _register(self, file: socket.socket | IO[bytes], read: Callable[[], None]) -> None:
        """Call `read` whenever the file has something to read."""
        self._selector.register(file, selectors.EVENT_READ, read)
        self._open_files.add(file)

    # Listening

    def _listen(self) -> bool:
        """Listen until torchrun has ended. Return False if the ranks' time was over before."""
        while self.refused is None and self._agents_run():
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                return bool(self.failed) and self._is_final(self.failed[-1])
            # An agent that has closed all its files says nothing when it ends.
            longest = LOOK if len(self._selector.get_map()) < 3 else 1.0
            self._look(min(longest, remaining))
        return True

    def _agents_run(self) -> bool:
        return any(agent.poll() is None for agent in self._agents)

    def _look(self, seconds: float) -> bool:
        """Read what has come in on the connections, after waiting for at most `seconds`.

        Return False if nothing has come. Older connections are read first: ranks come before those
        that take their place.
        """
        ready = {key.fd: key for key, _ in self._selector.select(seconds)}
        for fd in [fd for fd in self._selector.get_map() if fd in ready]:
            ready[fd].data()
        self._note_ended()
        return bool(ready)

    def _note_ended(self) -> None:
        """Note the failures since the last call. Processes without a report come first."""

        def moment(process: RankProcess) -> float:
            if process.report is None:
                return 0.0
            return process.report.get("time", math.inf)

        ended, self._ended = self._ended, []
        self._note_failures(sorted(ended, key=moment))

    def _receive(self, file: socket.socket | IO[bytes]) -> bytes:
        """Return the bytes that have come in on a connection.

        At its end, close it and return b"".
        """
        try:
            data = os.read(file.fileno(), CHUNK)
        except ConnectionResetError:  # the other process ended without reading everything
            data = b""
        if not data:
            self._selector.unregister(file)
            self._open_files.remove(file)
            file.close()
        return data

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._register(connection, partial(self._introduce, connection, Inbox()))

    def _introduce(self, connection: socket.socket, inbox: Inbox) -> None:
        """Read the first message of a new connection, which names the process and the purpose.

        `inbox` has the bytes that came in on this connection.
        """
        inbox.add(self._receive(connection))
        about = inbox.take()
        if about is None:
            return
        process = self._process(about["rank"], about["pid"], about["attempt"])
        if about["purpose"] == "output":
            read = partial(self._read_output, connection, process)
            self._selector.modify(connection, selectors.EVENT_READ, read)
            self._add_output(process, inbox.take_rest())
        else:
            hear = partial(self._hear_rank, process)
            read = partial(self._read_messages, connection, inbox, hear)
            self._selector.modify(connection, selectors.EVENT_READ, read)
            self._hear_all(inbox, hear)

    def _read_messages(self, connection: socket.socket, inbox: Inbox, hear: Hear) -> None:
        data = self._receive(connection)
        inbox.add(data)
        self._hear_all(inbox, hear)
        if not data:
            hear(None)

    def _hear_all(self, inbox: Inbox, hear: Hear) -> None:
        while (message := inbox.take()) is not None:
            hear(message)

    def _read_agent_output(self, pipe: IO[bytes]) -> None:
        self.agent_output.add(self._receive(pipe))

    def _read_output(self, connection: socket.socket, process: RankProcess) -> None:
        data = self._receive(connection)
        if data:
            self._add_output(process, data)
        elif self._is_printed(process):
            self._printer.end(process.rank)

    def _add_output(self, process: RankProcess, data: bytes) -> None:
        """Store and print the output of a process, with the script's name in place of its path."""
        data = data.replace(os.fsencode(self.request["script"]), os.fsencode(self.request["name"]))
        process.output.add(data)
        if self._is_printed(process):
            self._printer.add(process.rank, data)

    def _is_printed(self, process: RankProcess) -> bool:
        """Return whether a process belongs to the current attempt, whose output is printed."""
        return process.attempt == len(self._attempts) - 1

    def _hear_rank(self, process: RankProcess, report: dict[str, Any] | None) -> None:
        """Store the report of a rank. `report` is None when the rank has disconnected."""
        if report is None:
            process.disconnected = True
            if process.report is None:
                self._ended.append(process)
            return
        if self.late:  # the rank ends because it was asked to
            return
        process.report = report
        if "traceback" in report:
            script, name = self.request["script"], self.request["name"]
            report["traceback"] = report["traceback"].replace(script, name)
        if report["ended"] != "returned":
            self._ended.append(process)

    def _process(self, rank: int, pid: int, attempt: str) -> RankProcess:
        """Return the process with this number, which may be new.

        The first process of an attempt begins the attempt.
        """
        for process in self.processes:
            if process.pid == pid:
                return process
        if attempt not in self._attempts:
            self._begin_attempt(attempt)
        number = self._attempts.index(attempt)
        process = RankProcess(rank, number, pid, exit_code=self._exit_codes.get(pid))
        self.processes.append(process)
        if self._is_printed(process):
            self._printer.start(rank)
        return process

    def _begin_attempt(self, attempt: str) -> None:
        if not self._attempts:
            self._deadline = time.monotonic() + self._timeout
        else:
            self._note_ended()
            self._printer.end_attempt(self._restart_note(len(self._attempts) - 1))
        self._attempts.append(attempt)

    def _restart_note(self, attempt: int) -> str:
        """Return a text that says why torchrun starts all ranks again after this attempt."""
        first = self.first_failed(attempt)
        why = "a rank failed" if first is None else first.failure()[1].rstrip(".")
        restart = f"restart {attempt + 1} of {self.request['max_restarts']}"
        return f"[torchrun] {why}. All ranks start again: {restart}."

    def _hear_agent(self, message: dict[str, Any] | None) -> None:
        """Handle a message of an agent: its port, a refusal, or exit codes of its ranks."""
        if message is None:
            return
        if "port" in message and not self.devices:  # the first agent, for which the others wait
            self.devices = message["devices"]
            self._printer.print_note(self._banner())
            for other in self._to_agents[1:]:
                messages.send(other, port=message["port"])
        if "refused" in message and self.refused is None:
            kind, why = message["refused"]
            self.refused = kind, why
        for pid, code in message.get("exits", {}).items():
            self._exit_codes[int(pid)] = code
            for process in self.processes:
                if process.pid == int(pid):
                    process.exit_code = code
                    self._note_failures([process] if code else [])

    def _banner(self) -> str:
        """Return a text that says how many ranks there are, and on which devices."""
        virtual, world = self.request["virtual"], self.request["simulated"]
        if world is not None:
            from virtualgpu import simulated_world  # loaded when the request was made

            return "labkit: " + simulated_world.described(
                0, world["world"], world["nodes"], virtual["name"]
            )
        if virtual:
            on = f"one virtual GPU each, modelled on {with_maker(virtual['name'])}, virtual NCCL"
        elif self.devices == "cuda":
            on = "one GPU each, NCCL"
        else:
            on = "CPU tensors, gloo"
        ranks = f"{self.expected} rank{'s' * (self.expected > 1)}"
        if self.request["nodes"] > 1:
            ranks += f" on {self.request['nodes']} nodes"
        return f"labkit: {ranks}: {on}."

    def _note_failures(self, processes: list[RankProcess]) -> None:
        """Add the processes that failed to `failed`."""
        for process in processes:
            if process in self.failed or process.succeeded:
                continue
            self.failed.append(process)
            for other in self.processes:
                if other.attempt == process.attempt and other.succeeded:
                    process.ended_before.append(other.rank)
            # torchrun will soon end the ranks for which this one waited.
            if not self.stacks and process.waited_for(self.processes):
                self.stacks = self._stacks()
            if self._is_final(process):
                self._deadline = min(self._deadline, time.monotonic() + ENDING)

    def _is_final(self, process: RankProcess) -> bool:
        """Return whether torchrun starts no further attempt after a failure of this process."""
        return process.attempt >= self.request["max_restarts"]

    # Ending

    def _stacks(self) -> dict[int, str]:
        """Return the stack of each rank that still runs, as faulthandler writes it."""
        missing = [process for process in self.processes if not process.disconnected]
        for process in missing:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGUSR1)
        found: dict[int, str] = {}
        until = time.monotonic() + LOOKING
        while missing and time.monotonic() < until:
            time.sleep(0.01)
            for process in list(missing):
                with contextlib.suppress(OSError):
                    found[process.rank] = Path(self._folder, f"stacks-{process.pid}").read_text()
                if is_whole_stack(found.get(process.rank, "")) or not is_running(process.pid):
                    missing.remove(process)
        return found

    def _end_all(self) -> None:
        """Ask all processes to end, then kill them, and read what is left in the connections."""
        agents = [agent.pid for agent in self._agents if agent.poll() is None]
        if agents:
            ranks = [process.pid for process in self.processes if not process.disconnected]
            for pid in [*ranks, *agents]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + STOPPING
            while self._agents_run() and time.monotonic() < until:
                self._look(LOOK)
        kill_job(self._folder)
        for agent in self._agents:
            agent.wait(KILLING)
        while self._look(0):
            pass
        self._printer.end_attempt()
        self._selector.close()
        for file in self._open_files:
            file.close()
