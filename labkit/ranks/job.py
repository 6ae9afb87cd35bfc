"""A job: torchrun's agents and their ranks, started, listened to until they end, and ended with all that they started.

The ranks connect to a socket in the job's folder, twice each: what they print, and how they end. So the first to fail is known.
"""

import contextlib
import json
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from labkit.isolation import forkserver
from labkit.isolation.forkserver import Forked
from labkit.isolation.process import CHUNK, KILLING, LOOK, Ends, end_started_in, mark
from labkit.ranks.shown import Shown

STARTING = 120.0  # seconds for torchrun to import torch and start the ranks
ENDING = 10.0  # seconds for torchrun to end the other ranks, when one has failed for good
STOPPING = 1.0  # seconds for ranks to do what they do on SIGTERM
LOOKING = 0.3  # seconds for ranks that take too long to write where they are

# What PyTorch says in a rank that has lost another one (gloo's pair.cc, NCCL's and the stores' errors).
_LOST = r"by peer|remote process|remote error|Connection (was )?(closed|reset)|Broken pipe"
_AGENT = os.path.join(os.path.dirname(__file__), "agent.py")


@dataclass(eq=False)
class Life:
    """One start of a rank. `report` is what it said of its end; `exit_code` as subprocess gives it, None while it is unknown; `left` the
    ranks that had ended well when this one failed."""

    rank: int
    attempt: int
    pid: int
    report: dict[str, Any] | None = None
    exit_code: int | None = None
    gone: bool = False
    left: list[int] = field(default_factory=list)
    output: Ends = field(default_factory=Ends)

    @property
    def well(self) -> bool:
        return self.report is not None and self.report["ended"] == "returned" and not self.exit_code

    @property
    def complains(self) -> bool:
        """Did it fail because it lost another rank?"""
        return self.report is not None and re.search(_LOST, self.report.get("text", "")) is not None

    @property
    def text(self) -> str:
        """All that it printed, and the traceback that Python would have printed."""
        return self.output.text() + (self.report or {}).get("traceback", "")


@dataclass(eq=False)
class _Line:
    """A connection, and what was received of its next line. `life` from its first line on."""

    socket: socket.socket
    rest: bytes = b""
    purpose: str = ""
    life: Life | None = None


class Job:
    """A run of the request that lies in `folder`. `lives` are the ranks' in order of their start, `failed` those that failed, in order."""

    def __init__(self, folder: str, request: dict[str, Any], shown: Shown) -> None:
        self._folder, self.request, self._shown = folder, request, shown
        self.expected = request["ranks_here"] * request["nodes_here"]
        self.lives: list[Life] = []
        self.failed: list[Life] = []
        self.refused: tuple[str, str] | None = None
        self.devices = ""
        self.said = Ends()  # by torchrun itself
        self.late = False
        self.stacks: dict[int, str] = {}  # where ranks were that took too long
        self._attempts: list[str] = []
        self._timeout = self._deadline = math.inf
        self._agents: list[Forked | subprocess.Popen] = []
        self._controls: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()

    def run(self, timeout: float | None) -> None:
        """Listen until all ranks have ended, or until they have run for `timeout` seconds. No process is left in any case."""
        self._timeout = math.inf if timeout is None else timeout
        self._deadline = time.monotonic() + STARTING + 2 * self.request["join_timeout"]  # a store and a rendezvous
        try:
            self._start()
            self.late = not self._listen()
            if self.late:
                self.stacks = self._stacks()
        finally:
            self._end_all()

    @property
    def met(self) -> bool:
        """Has an agent here found the place where the nodes meet?"""
        return self.devices != ""

    def attempts(self) -> list[list[Life]]:
        """The lives of each attempt, in the order of the ranks."""
        count = range(len(self._attempts))
        return [sorted((life for life in self.lives if life.attempt == k), key=lambda life: life.rank) for k in count]

    def first_failed(self, attempt: int) -> Life | None:
        """The rank because of which the attempt failed: what a rank says of its peers, and whom torchrun ended, comes after."""
        failed = [life for life in self.failed if life.attempt == attempt]
        return min(failed, key=lambda life: life.complains or life.exit_code == -signal.SIGTERM, default=None)

    def _start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        self._selector.register(listener, selectors.EVENT_READ, _Line(listener, purpose="listener"))
        listener.bind(os.path.join(self._folder, "ranks"))
        listener.listen(256)
        for node in range(self.request["nodes_here"]):
            self._start_agent(node)
        self._tell_endpoint(self._controls[0], self.request["endpoint"] or "127.0.0.1:0")

    def _start_agent(self, node: int) -> None:
        control, theirs = socket.socketpair()
        self._controls.append(control)
        self._selector.register(control, selectors.EVENT_READ, _Line(control, purpose="agent"))
        said, output = os.pipe()
        self._selector.register(open(said, "rb", buffering=0), selectors.EVENT_READ, self.said)  # noqa: SIM115
        with theirs, os.fdopen(output, "wb"):
            env = {"OMP_NUM_THREADS": "1", **os.environ, **mark(self._folder)}
            command = [_AGENT, self._folder, str(theirs.fileno()), str(node)]
            self._agents.append(forkserver.popen(command, env, output=output, pass_fds=[theirs.fileno()]))

    def _tell_endpoint(self, control: socket.socket, endpoint: str) -> None:
        with contextlib.suppress(OSError):
            control.sendall(endpoint.encode() + b"\n")

    def _listen(self) -> bool:
        """False if the ranks still run when their time is over."""
        while any(agent.poll() is None for agent in self._agents) and self.refused is None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                return bool(self.failed) and self._is_final(self.failed[-1])
            self._look(min(LOOK if len(self._selector.get_map()) < 3 else 1.0, remaining))
        return True

    def _look(self, seconds: float) -> bool:
        """Take in what has come; False if nothing has."""
        ready = self._selector.select(seconds)
        died: list[Life] = []
        told: list[Life] = []
        for key, _ in ready:
            line = key.data
            if line is self.said:
                self._read_agent(key.fileobj)
            elif line.purpose == "listener":
                connection, _ = line.socket.accept()
                self._selector.register(connection, selectors.EVENT_READ, _Line(connection))
            else:
                self._read(line, died, told)
        self._note_failures(died + sorted(told, key=lambda life: life.report.get("time", math.inf)))
        return bool(ready)

    def _read_agent(self, pipe: Any) -> None:
        data = os.read(pipe.fileno(), CHUNK)
        self.said.add(data)
        if not data:
            self._selector.unregister(pipe)
            pipe.close()

    def _read(self, line: _Line, died: list[Life], told: list[Life]) -> None:
        try:
            data = line.socket.recv(CHUNK)
        except ConnectionResetError:  # a process that ended with something unread
            data = b""
        if not data:
            self._close(line, died)
        elif line.purpose == "output":
            self._add_output(line.life, data)
        else:
            line.rest += data
            while b"\n" in line.rest and line.purpose != "output":
                first, line.rest = line.rest.split(b"\n", 1)
                self._hear(line, json.loads(first), told)
            if line.purpose == "output" and line.rest:
                self._add_output(line.life, line.rest)

    def _close(self, line: _Line, died: list[Life]) -> None:
        self._selector.unregister(line.socket)
        if line.purpose != "agent":
            line.socket.close()
        if line.purpose == "output" and self._is_shown(line.life):
            self._shown.end(line.life.rank)
        if line.purpose == "control":
            line.life.gone = True
            if line.life.report is None:
                died.append(line.life)

    def _add_output(self, life: Life, data: bytes) -> None:
        data = data.replace(os.fsencode(self.request["script"]), os.fsencode(self.request["name"]))
        life.output.add(data)
        if self._is_shown(life):
            self._shown.add(life.rank, data)

    def _is_shown(self, life: Life) -> bool:
        """Not what a process of an attempt that is over still prints."""
        return life.attempt == len(self._attempts) - 1

    def _hear(self, line: _Line, told: dict[str, Any], failed: list[Life]) -> None:
        if line.purpose == "agent":
            self._hear_agent(line.socket, told)
        elif line.life is None:
            line.purpose, line.life = told["purpose"], self._life(told["rank"], told["pid"], told["attempt"])
        elif not self.late:  # then it ends because it was looked at, or asked to
            line.life.report = told
            if "traceback" in told:
                told["traceback"] = told["traceback"].replace(self.request["script"], self.request["name"])
            if told["ended"] != "returned":
                failed.append(line.life)

    def _life(self, rank: int, pid: int, attempt: str) -> Life:
        """The life of this process. A name of an attempt that was not heard before begins a new one."""
        found = next((life for life in self.lives if life.pid == pid), None)
        if found is not None:
            return found
        if attempt not in self._attempts:
            if not self._attempts:
                self._deadline = time.monotonic() + self._timeout
            else:
                self._shown.end_attempt(self.restart_note(len(self._attempts) - 1))
            self._attempts.append(attempt)
        life = Life(rank, self._attempts.index(attempt), pid)
        self.lives.append(life)
        if self._is_shown(life):
            self._shown.start(rank)
        return life

    def restart_note(self, attempt: int) -> str:
        """Why torchrun starts all ranks again after this attempt."""
        from labkit.ranks.outcome import ended  # which knows jobs

        first = self.first_failed(attempt)
        why = "a rank elsewhere failed" if first is None else ended(first)[1].rstrip(".")
        return f"[torchrun] {why}. All ranks start again: restart {attempt + 1} of {self.request['max_restarts']}."

    def _hear_agent(self, control: socket.socket, told: dict[str, Any]) -> None:
        if "endpoint" in told:
            if not self.devices:
                self.devices = told["devices"]
                self._shown.say(self._banner())
            if control is self._controls[0]:
                for other in self._controls[1:]:
                    self._tell_endpoint(other, told["endpoint"])
        if "refused" in told:
            self.refused = self.refused or tuple(told["refused"])
        for pid, code in told.get("exits", {}).items():
            for life in self.lives:
                if life.pid == int(pid):
                    life.exit_code = code
                    self._note_failures([life] if code else [])

    def _banner(self) -> str:
        on = "one GPU each, NCCL" if self.devices == "cuda" else "CPU tensors, gloo"
        ranks, nodes = self.request["ranks_here"] * self.request["nodes"], self.request["nodes"]
        return f"labkit: {ranks} rank{'s' * (ranks > 1)}{f' on {nodes} nodes' if nodes > 1 else ''}: {on}."

    def _note_failures(self, lives: list[Life]) -> None:
        for life in lives:
            if life not in self.failed and not life.well:
                self.failed.append(life)
                life.left = [other.rank for other in self.lives if other.attempt == life.attempt and other.well]
                if self._is_final(life):
                    self._deadline = min(self._deadline, time.monotonic() + ENDING)

    def _is_final(self, life: Life) -> bool:
        return life.attempt >= self.request["max_restarts"]

    def _stacks(self) -> dict[int, str]:
        """What faulthandler writes in each rank that still runs."""
        running = [life for life in self.lives if not life.gone]
        for life in running:
            with contextlib.suppress(OSError):
                os.kill(life.pid, signal.SIGUSR1)
        if running:
            time.sleep(LOOKING)
        found = {}
        for life in running:
            with contextlib.suppress(OSError), open(os.path.join(self._folder, f"stacks-{life.pid}")) as file:
                found[life.rank] = file.read()
        return found

    def _end_all(self) -> None:
        """Ask what is left to end, then kill it; then read what lies in the connections."""
        running = [agent.pid for agent in self._agents if agent.poll() is None]
        asked = running != []
        for pid in (*(life.pid for life in self.lives if asked and not life.gone), *running):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + STOPPING
        while asked and any(agent.poll() is None for agent in self._agents) and time.monotonic() < until:
            self._look(LOOK)
        end_started_in(self._folder)
        for agent in self._agents:
            agent.wait(KILLING)
        while self._look(0):
            pass
        self._shown.end_attempt()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()
        for control in self._controls:
            control.close()
