"""The program of an agent: PyTorch's own torchrun, one process per node.

The process that waits for the ranks starts the agents. They end when that process ends.
"""

import json
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if not sys.flags.safe_path:
    del sys.path[0]  # the folder of this file, which Python has put there
# Import this kit, even if another one is installed.
sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from labkit.processes import forkserver, messages
from labkit.processes.supervision import end_with_caller, stay_until_cleared
from virtualgpu.machines import share

sys.path.pop(0)

import psutil
import torch
from torch.distributed import TCPStore, launcher, run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

ADDRESS = "127.0.0.1"
PAUSE = 0.02  # seconds between two looks at the store in which the nodes meet
JOINING = 300  # seconds for the nodes to meet
_RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.py")


class RefusedError(Exception):
    """Error that says why the ranks cannot be started. Its arguments are a kind and a sentence."""


def main(folder: str, fileno: str, node: str) -> None:
    """Run the agent of a node for the request in a folder.

    Args:
        folder: the job's folder, with the file request.json.
        fileno: the number of the connection to the process that waits for the ranks.
        node: the number of the node.
    """
    caller = socket.socket(fileno=int(fileno))
    request = json.loads((Path(folder) / "request.json").read_text())
    status = 1
    try:
        port = _received_port(caller, folder)
        _choose_devices(request, int(node))
        if virtual := request["virtual"]:
            share(virtual["gpus"], virtual["like"], virtual["memory"])
        store = TCPStore(ADDRESS, port, is_master=port == 0, wait_for_workers=False)
        devices = "cpu" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else "cuda"
        messages.send(caller, port=store.port, devices=devices)
        _let_gloo_use_local_network()
        _make_new_store_for_each_attempt()
        _report_exit_codes(caller)
        if forkserver.is_here():
            _fork_ranks()
        _meet_quickly()
        run.main(_torchrun_arguments(request, folder, store.port))
        status = 0
    except ChildFailedError:
        pass  # the ranks have reported it
    except RefusedError as error:
        messages.send(caller, refused=error.args)
    except Exception as error:
        messages.send(caller, refused=("start", f"{type(error).__name__}: {error}"))
    stay_until_cleared(caller)
    sys.stdout.flush()
    os._exit(status)  # also ends the threads and the store


def _received_port(caller: socket.socket, folder: str) -> int:
    """Return the port at which the agents of all nodes meet.

    The first agent receives 0 from the caller, and chooses a port.
    """
    try:
        port: int = messages.receive(caller)["port"]
    except (OSError, EOFError):
        os._exit(1)
    end_with_caller(caller, folder)
    return port


def _choose_devices(request: dict[str, Any], node: int) -> None:
    """Let the ranks of this node see their GPUs if there is a GPU per rank, and else none.

    Raises RefusedError if the request demands more GPUs than there are.
    """
    ranks = request["ranks_of_node"]
    needed = ranks * request["nodes"]
    asked = "cpu" if request["virtual"] else request["devices"]
    count = 0 if asked == "cpu" else torch.cuda.device_count()
    if asked == "cuda" and count < needed:
        raise RefusedError(
            "start", f'devices="cuda" asks for {needed} real CUDA GPUs, and PyTorch sees {count}'
        )
    if count < needed:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif request["nodes"] > 1:
        every_number = ",".join(map(str, range(count)))
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", every_number).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[node * ranks : (node + 1) * ranks])


def _let_gloo_use_local_network() -> None:
    """Let gloo use the network interface on which the agents meet.

    By default gloo looks up the machine's name, which may have no address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == ADDRESS for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def _make_new_store_for_each_attempt() -> None:
    """Let torchrun make a new store whenever it starts all ranks again.

    In the store of an earlier attempt, ranks would find the addresses of ranks that have ended.
    """
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    join = handler.next_rendezvous
    kept = []  # so that each store has a port of its own

    def next_rendezvous(self: Any) -> Any:
        self._bootstrap_store_info = None
        joined = join(self)
        kept.append(self._shared_tcp_store_server)
        return joined

    handler.next_rendezvous = next_rendezvous


def _report_exit_codes(caller: socket.socket) -> None:
    """Let torchrun report the exit codes whenever ranks fail.

    By itself, torchrun reports them only after the last attempt.
    """

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                failures = result.failures.values()
                messages.send(caller, exits={failure.pid: failure.exitcode for failure in failures})
            return result

    # torchrun looks up this name when it starts.
    launcher.api.LocalElasticAgent = Agent  # type: ignore[misc]


def _fork_ranks() -> None:
    """Let torchrun start its ranks as copies of the fork server.

    Copies of this process would not do, because it has threads and may have used a GPU.
    """
    start_afresh = SubprocessHandler._popen

    def popen(self: Any, args: tuple, env: dict[str, str]) -> Any:
        # The command differs if it binds the rank to a processor, or uses another Python.
        if args[:3] != (sys.executable, "-u", _RANK):
            return start_afresh(self, args, env)
        return forkserver.popen(args[2:], env)

    SubprocessHandler._popen = popen  # type: ignore[method-assign]


def _meet_quickly() -> None:
    """Let torchrun look for the other nodes often.

    By default it looks once per second, because the store may be on another machine.
    """
    rendezvous: Any = dynamic_rendezvous
    rendezvous._delay = lambda seconds: time.sleep(PAUSE)
    rendezvous._BackendRendezvousStateHolder = partial(
        rendezvous._BackendRendezvousStateHolder, cache_duration=PAUSE
    )


def _torchrun_arguments(request: dict[str, Any], folder: str, port: int) -> list[str]:
    return [
        f"--nnodes={request['nodes']}",
        f"--nproc-per-node={request['ranks_of_node']}",
        f"--max-restarts={request['max_restarts']}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={ADDRESS}:{port}",
        f"--rdzv-conf=is_host=0,join_timeout={JOINING},read_timeout={JOINING}",
        "--rdzv-id=labkit",
        f"--local-addr={ADDRESS}",
        f"--log-dir={folder}",  # torchrun makes a folder there, even if it logs nothing
        _RANK,
        folder,  # torchrun would parse the script's arguments, so they are in the request
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
