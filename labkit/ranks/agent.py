"""PyTorch's own torchrun, one process a node, started by the process that waits for the ranks and ended with it."""

import json
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if not sys.flags.safe_path:
    del sys.path[0]  # this folder
sys.path.insert(
    0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
)  # for this kit, not one installed
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
PAUSE = 0.02  # seconds between two looks at the store of the nodes
JOINING = 300  # seconds for the nodes to meet
_RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.py")


class RefusedError(Exception):
    """The ranks cannot be started: a kind, and a sentence that says why."""


def main(folder: str, fileno: str, node: str) -> None:
    """Run the `node`-th agent of this machine, as `folder`'s request asks. Messages to the caller report what comes of it."""
    caller = socket.socket(fileno=int(fileno))
    request = json.loads((Path(folder) / "request.json").read_text())
    status = 1
    try:
        port = _port(caller, folder)
        _choose_devices(request, int(node))
        if virtual := request["virtual"]:
            share(virtual["gpus"], virtual["like"], virtual["memory"])
        store = TCPStore(ADDRESS, port, is_master=port == 0, wait_for_workers=False)
        messages.send(
            caller,
            port=store.port,
            devices="cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else "cpu",
        )
        _name_interface()
        _renew_stores()
        _report_exits(caller)
        if forkserver.is_here():
            _fork_ranks()
        _look_often()
        run.main(_torchrun_arguments(request, folder, store.port))
        status = 0
    except ChildFailedError:
        pass  # reported rank by rank
    except RefusedError as error:
        messages.send(caller, refused=error.args)
    except Exception as error:
        messages.send(caller, refused=("start", f"{type(error).__name__}: {error}"))
    stay_until_cleared(caller)
    sys.stdout.flush()
    os._exit(status)  # with its threads and its store


def _port(caller: socket.socket, folder: str) -> int:
    """Where the agents of this job meet, as the caller says: 0 for the agent that chooses a port."""
    try:
        port: int = messages.receive(caller)["port"]
    except (OSError, EOFError):
        os._exit(1)
    end_with_caller(caller, folder)
    return port


def _choose_devices(request: dict[str, Any], node: int) -> None:
    """Let the ranks see the GPUs of this machine, a part for each node, if there is one for each rank; otherwise none."""
    ranks, wish = request["ranks_of_node"], "cpu" if request["virtual"] else request["devices"]
    count = torch.cuda.device_count() if wish != "cpu" else 0
    needed = ranks * request["nodes"]
    if wish == "cuda" and count < needed:
        raise RefusedError(
            "start", f'devices="cuda" asks for {needed} real CUDA GPUs, and PyTorch sees {count}'
        )
    if count < needed:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif request["nodes"] > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[node * ranks : (node + 1) * ranks])


def _name_interface() -> None:
    """Gloo shall use the network that the agents met on. Left alone, it goes by the machine's name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == ADDRESS for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def _renew_stores() -> None:
    """Have torchrun's agent, which keeps the store in which the ranks meet, make a new one whenever it starts them again.

    In the store of the first start, they would look for the ranks that have ended: their addresses are still there.
    """
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    join = handler.next_rendezvous
    kept = []  # so that each start has a port of its own

    def next_rendezvous(self: Any) -> Any:
        self._bootstrap_store_info = None
        joined = join(self)
        kept.append(self._shared_tcp_store_server)
        return joined

    handler.next_rendezvous = next_rendezvous


def _report_exits(caller: socket.socket) -> None:
    """Have torchrun's agent report how its ranks ended, whenever one failed: by itself it only reports the last time."""

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                messages.send(
                    caller,
                    exits={failure.pid: failure.exitcode for failure in result.failures.values()},
                )
            return result

    launcher.api.LocalElasticAgent = Agent  # type: ignore[misc]  # as torchrun looks it up when it starts


def _fork_ranks() -> None:
    """Have torchrun start its ranks as copies of the fork server: not of this process, which has threads and may have touched a GPU."""
    start_afresh = SubprocessHandler._popen

    def popen(self: Any, args: tuple, env: dict[str, str]) -> Any:
        if args[:3] != (
            sys.executable,
            "-u",
            _RANK,
        ):  # with a command before it that binds it to a processor, or with another Python
            return start_afresh(self, args, env)
        return forkserver.popen(args[2:], env, with_caller=True)

    SubprocessHandler._popen = popen  # type: ignore[method-assign]


def _look_often() -> None:
    """Have the nodes look for each other often: torchrun's look once a second, because their store may be far."""
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
        f"--log-dir={folder}",  # it makes a folder there, wherever the output goes
        _RANK,
        folder,  # of the request, which has the script's arguments: torchrun would parse them
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
