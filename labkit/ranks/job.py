"""A job: torchrun's agents and their ranks, started, listened to until they end, and ended with all that they started.

The ranks connect to a socket in the job's folder, twice each: what they print, and how they end. So the first to fail is known.
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
ENDING = 10.0  # seconds for torchrun to end the other ranks, when one has failed for good
STOPPING = 1.0  # seconds for ranks to do what they do on SIGTERM
LOOKING = 5.0  # seconds for ranks that take too long to write where they are, on a busy machine

_AGENT = os.path.join(os.path.dirname(__file__), "agent.py")


class TorchrunJob:
    """One call of torchrun for the request that lies in `folder`.

    Attributes:
        processes: the ranks', in the order of their start.
        failed: those that failed, in order.
        refused: why torchrun did not start the ranks, a kind and a sentence.
        devices: "cuda" or "cpu", as soon as the first agent has made the store at which the nodes meet.
        agent_output: what torchrun itself printed.
        late: whether the ranks took too long.
        stacks: by rank, where those were that took too long, or that another one waited for in vain.
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
        self._attempts: list[str] = []
        self._exit_codes: dict[
            int, int
        ] = {}  # by process, as torchrun tells them: of one that is heard late, before it is
        self._timeout = self._deadline = math.inf
        self._agents: list[Forked | subprocess.Popen[bytes]] = []
        self._to_agents: list[socket.socket] = []
        self._selector = (
            selectors.DefaultSelector()
        )  # the data of each file is the function that reads it
        self._open_files: set[socket.socket | IO[bytes]] = set()
        self._ended: list[RankProcess] = []  # since the last look

    def run(self, timeout: float | None) -> None:
        """Listen until all ranks have ended, or until they have run for `timeout` seconds. No process is left in any case."""
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
        """The processes of each attempt, in the order of the ranks."""
        count = range(len(self._attempts))
        return [
            sorted(
                (process for process in self.processes if process.attempt == k),
                key=lambda process: process.rank,
            )
            for k in count
        ]

    def trace_file(self, process: RankProcess) -> Path:
        return Path(self._folder, f"trace-{process.pid}.npz")

    def first_failed(self, attempt: int) -> RankProcess | None:
        """The rank because of which the attempt failed: one that lost another, and one that torchrun ended, failed after it. Of what it
        has ended, torchrun tells no exit code."""
        failed = [process for process in self.failed if process.attempt == attempt]

        def was_ended(process: RankProcess) -> bool:
            return process.exit_code == -signal.SIGTERM or (
                process.report is None and process.exit_code is None
            )

        return min(
            failed, key=lambda process: process.lost_another or was_ended(process), default=None
        )

    # Starting

    def _start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        self._register(listener, partial(self._accept, listener))
        listener.bind(os.path.join(self._folder, "ranks"))
        listener.listen(256)
        for node in range(self.request["nodes"]):
            self._start_agent(node)
        messages.send(self._to_agents[0], port=0)  # it chooses one

    def _start_agent(self, node: int) -> None:
        connection, theirs = socket.socketpair()
        self._to_agents.append(connection)
        self._register(
            connection, partial(self._read_messages, connection, Inbox(), self._hear_agent)
        )
        reading, writing = os.pipe()
        pipe = open(reading, "rb", buffering=0)  # noqa: SIM115
        self._register(pipe, partial(self._read_agent_output, pipe))
        with theirs, os.fdopen(writing, "wb"):
            fileno = theirs.fileno()
            command = [_AGENT, self._folder, str(fileno), str(node)]
            environment = rank_environment(self._folder)
            agent = forkserver.popen(
                command, environment, output=writing, pass_fds=[fileno], with_server=True
            )
            self._agents.append(agent)

    def _register(self, file: socket.socket | IO[bytes], read: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, read)
        self._open_files.add(file)

    # Listening

    def _listen(self) -> bool:
        """False if the ranks still run when their time is over."""
        while any(agent.poll() is None for agent in self._agents) and self.refused is None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                return bool(self.failed) and self._is_final(self.failed[-1])
            self._look(min(LOOK if len(self._selector.get_map()) < 3 else 1.0, remaining))
        return True

    def _look(self, seconds: float) -> bool:
        """Take in what has come; False if nothing has. What older connections say comes first: that of ranks before that of those which
        take their place."""
        ready = {key.fd: key for key, _ in self._selector.select(seconds)}
        for fd in [fd for fd in self._selector.get_map() if fd in ready]:
            ready[fd].data()
        self._note_ended()
        return bool(ready)

    def _note_ended(self) -> None:
        """Of the ranks that ended at once, the ones that reported nothing did so first."""
        ended, self._ended = self._ended, []
        self._note_failures(
            sorted(ended, key=lambda process: (process.report or {"time": 0}).get("time", math.inf))
        )

    def _receive(self, file: socket.socket | IO[bytes]) -> bytes:
        """What has come; nothing from a file at its end, which is closed then."""
        try:
            data = os.read(file.fileno(), CHUNK)
        except ConnectionResetError:  # a process that ended with something unread
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
        """Read the first message of a connection: which rank it is, and for what."""
        inbox.add(self._receive(connection))
        about = inbox.take()
        if about is None:
            return
        process = self._process(about["rank"], about["pid"], about["attempt"])
        if about["purpose"] == "output":
            self._selector.modify(
                connection, selectors.EVENT_READ, partial(self._read_output, connection, process)
            )
            self._add_output(process, inbox.take_rest())
        else:
            hear = partial(self._hear_rank, process)
            self._selector.modify(
                connection,
                selectors.EVENT_READ,
                partial(self._read_messages, connection, inbox, hear),
            )
            self._hear_all(inbox, hear)

    def _read_messages(
        self, connection: socket.socket, inbox: Inbox, hear: Callable[[dict[str, Any] | None], None]
    ) -> None:
        data = self._receive(connection)
        inbox.add(data)
        self._hear_all(inbox, hear)
        if not data:
            hear(None)

    def _hear_all(self, inbox: Inbox, hear: Callable[[dict[str, Any] | None], None]) -> None:
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
        data = data.replace(os.fsencode(self.request["script"]), os.fsencode(self.request["name"]))
        process.output.add(data)
        if self._is_printed(process):
            self._printer.add(process.rank, data)

    def _is_printed(self, process: RankProcess) -> bool:
        """Not what a process of an attempt that is over still prints."""
        return process.attempt == len(self._attempts) - 1

    def _hear_rank(self, process: RankProcess, report: dict[str, Any] | None) -> None:
        """Its report; None when it is disconnected."""
        if report is None:
            process.disconnected = True
            if process.report is None:
                self._ended.append(process)
        elif not self.late:  # then it ends because it was looked at, or asked to
            process.report = report
            if "traceback" in report:
                report["traceback"] = report["traceback"].replace(
                    self.request["script"], self.request["name"]
                )
            if report["ended"] != "returned":
                self._ended.append(process)

    def _process(self, rank: int, pid: int, attempt: str) -> RankProcess:
        """The process of this number. A name of an attempt that was not heard before begins a new one."""
        found = next((process for process in self.processes if process.pid == pid), None)
        if found is not None:
            return found
        if attempt not in self._attempts:
            if not self._attempts:
                self._deadline = time.monotonic() + self._timeout
            else:
                self._note_ended()
                self._printer.end_attempt(self._restart_note(len(self._attempts) - 1))
            self._attempts.append(attempt)
        process = RankProcess(
            rank, self._attempts.index(attempt), pid, exit_code=self._exit_codes.get(pid)
        )
        self.processes.append(process)
        if self._is_printed(process):
            self._printer.start(rank)
        return process

    def _restart_note(self, attempt: int) -> str:
        """Why torchrun starts all ranks again after this attempt."""
        first = self.first_failed(attempt)
        why = "a rank failed" if first is None else first.failure()[1].rstrip(".")
        return f"[torchrun] {why}. All ranks start again: restart {attempt + 1} of {self.request['max_restarts']}."

    def _hear_agent(self, message: dict[str, Any] | None) -> None:
        if message is None:
            return
        if "port" in message and not self.devices:  # of the first agent: the others wait to be told
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
        world = self.request["simulated"]
        if world is not None:
            from virtualgpu import simulated_world  # loaded when the request was made

            return f"labkit: {simulated_world.described(0, world['world'], world['nodes'], self.request['virtual']['name'])}"
        on = "one GPU each, NCCL" if self.devices == "cuda" else "CPU tensors, gloo"
        if virtual := self.request["virtual"]:
            on = f"one virtual GPU each, modelled on {with_maker(virtual['name'])}, virtual NCCL"
        ranks, nodes = self.expected, self.request["nodes"]
        return f"labkit: {ranks} rank{'s' * (ranks > 1)}{f' on {nodes} nodes' if nodes > 1 else ''}: {on}."

    def _note_failures(self, processes: list[RankProcess]) -> None:
        for process in processes:
            if process not in self.failed and not process.succeeded:
                self.failed.append(process)
                process.ended_before = [
                    other.rank
                    for other in self.processes
                    if other.attempt == process.attempt and other.succeeded
                ]
                if not self.stacks and process.waited_for(
                    self.processes
                ):  # before torchrun ends them
                    self.stacks = self._stacks()
                if self._is_final(process):
                    self._deadline = min(self._deadline, time.monotonic() + ENDING)

    def _is_final(self, process: RankProcess) -> bool:
        return process.attempt >= self.request["max_restarts"]

    # Ending

    def _stacks(self) -> dict[int, str]:
        """What faulthandler writes in each rank that still runs."""
        missing = [process for process in self.processes if not process.disconnected]
        for process in missing:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGUSR1)
        found: dict[int, str] = {}
        until = time.monotonic() + LOOKING
        while missing and time.monotonic() < until:
            time.sleep(0.01)
            for process in missing:
                with contextlib.suppress(OSError):
                    found[process.rank] = Path(self._folder, f"stacks-{process.pid}").read_text()
            missing = [
                process
                for process in missing
                if not is_whole_stack(found.get(process.rank, "")) and is_running(process.pid)
            ]
        return found

    def _end_all(self) -> None:
        """Ask what is left to end, then kill it; then read what lies in the connections."""
        running = [agent.pid for agent in self._agents if agent.poll() is None]
        asked = running != []
        for pid in (
            *(process.pid for process in self.processes if asked and not process.disconnected),
            *running,
        ):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + STOPPING
        while (
            asked
            and any(agent.poll() is None for agent in self._agents)
            and time.monotonic() < until
        ):
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
