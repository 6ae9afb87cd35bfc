"""What students may try: none earns a point in silence, stops the grading, or touches another's marks; and honest habits cost nothing."""

import pytest
from handed_in import solution

pytestmark = pytest.mark.slow

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
HABITS = {
    "device": "torch.set_default_device('cuda')",
    "no gradients": "torch.set_grad_enabled(False)",
    "double": "torch.set_default_dtype(torch.float64)",
    "inference": "torch.inference_mode().__enter__()",
    "printing": "torch.set_printoptions(precision=2)\ntorch.Tensor.__repr__ = lambda self: 'T'",
    "print": "import builtins\nfrom functools import partial\nbuiltins.print = partial(print, flush=True)",
    "load": "from functools import partial\ntorch.load = partial(torch.load, weights_only=False)",
    "threads": "torch.set_num_threads(2)\ntorch.use_deterministic_algorithms(True)",
    "warnings": "import warnings\nwarnings.filterwarnings('error')",
    "anomaly": "torch.autograd.set_detect_anomaly(True)",
    "collector": "import gc\ngc.disable()\ngc.collect()",
    "names of this machine": "import socket\nfor name in ('localhost', socket.gethostname()): socket.getaddrinfo(name, 0)",
    "labs": "kit = [labkit.labs.ShardingLab, labkit.labs.plot_prices]\nfrom labkit.labs import Lab\nhelp(Lab)",
    "folder": "import os\nos.makedirs('mine', exist_ok=True)\nos.chdir('mine')",
    "a module of one's own": "open('mine.py', 'w').write('def double(x): return 2 * x')\nimport mine\nmine.double(1)",
    "sorting by attributes": "from operator import attrgetter\nsorted([torch.ones(2), torch.ones(1)], key=attrgetter('nbytes'))\n"
    "print('{0.shape} {1:.2f}'.format(torch.ones(1), 2))",
    "snapshots": "torch.cuda.memory._record_memory_history()\ntorch.cuda.memory._snapshot()\n"
    "input = torch.ones(1)\ninput.type(torch.int32)",
    "scratch": "try: import wandb\nexcept ImportError: pass\nfor step in range(500): print(step)\nimport inspect\nlabkit.use?\n"
    "print(inspect.signature(labkit.use))",
    "syntax": "def f(:",
    "threads and processes": "import multiprocessing\nfrom concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(2) as pool: list(pool.map(abs, [-1]))\n"
    "with multiprocessing.get_context('fork').Pool(1) as pool: pool.map(abs, [-1])",
    "names": "from collections import namedtuple\nfrom dataclasses import dataclass\nPoint = namedtuple('Point', 'x y')\n"
    "@dataclass\nclass Size:\n    rows: int = 0\nlist_ = [Point(1, 2), Size(3)]\nsum = 3\nmax = 4",
    "tracebacks": "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()",
    "source": "import inspect\ndef f(x): return x\nprint(inspect.getsource(f), inspect.signature(torch.nn.Linear))",
    "magics": "%matplotlib inline\n%timeit -n 1 -r 1 torch.ones(3)\n!echo hello",
    "time": "%%time\nx = torch.ones(3)",
    "getattr": "for name in ('float32', 'int64'):\n    torch.ones(2, dtype=getattr(torch, name))\nsetattr(nn.Linear(2, 2), 'extra', 1)",
    "flags": "torch.backends.cudnn.benchmark = True\ntorch.set_float32_matmul_precision('medium')",
    "memory": "import psutil, os\npsutil.Process(os.getpid()).memory_info()",
    "pickle": "import pickle, copy\ncopy.deepcopy(pickle.loads(pickle.dumps(nn.Linear(2, 2))))",
    "seed": "import random, numpy\ntorch.manual_seed(0)\nrandom.seed(0)\nnumpy.random.seed(0)",
    "autocast": "torch.autocast('cuda').__enter__()",
    "error": "1 / 0",
    "another machine": "labkit.use(None)\nlabkit.use(gpus=4)",
    "recursion": "import sys\nsys.setrecursionlimit(5000)\nsys.path.append('.')",
    "saved tensors": "import pickle, copy\nt = torch.ones(3, device='cuda')\ntorch.save(t, 'x.pt')\n"
    "torch.load('x.pt')\npickle.loads(pickle.dumps(t))\n"
    "copy.deepcopy(nn.Linear(2, 2).cuda())",
    "loaders left open": "from torch.utils.data import DataLoader, TensorDataset\n"
    "rows = DataLoader(TensorDataset(torch.ones(8, 2)), num_workers=2, persistent_workers=True)\nfor x, in rows: x.cuda()",
    "processes left open": "import multiprocessing as mp, subprocess\npool = mp.get_context('fork').Pool(2)\npool.map(abs, [-1])\n"
    "subprocess.Popen(['sleep', '100'])\nprocess = mp.get_context('spawn').Process(target=print)\nprocess.start()\nprocess.join()",
    "looking around": "help(labkit)\nlabkit.labs?\nprint(labkit, labkit.__doc__, dir(labkit.labs), vars().keys())\n"
    "nn.Linear(2, 2).__dict__.keys()",
    "Colab": "import sys\nON_COLAB = 'google.colab' in sys.modules\nfrom importlib.metadata import version\nversion('torch')",
    "stars": "from labkit import *\nfrom torch import *\nimport torch, labkit\nfrom torch import nn",
    "classes": "from __future__ import annotations\nimport typing, dataclasses\n"
    "@dataclasses.dataclass(frozen=True)\nclass C:\n    x: int = 1\n"
    "typing.get_type_hints(C)\nclass Net(nn.Module):\n    def __init__(self): super(Net, self).__init__()\nNet()",
    "programs in texts": "print(eval('1 + 1'))\nexec('y = 3')\n!nvidia-smi\n%pip --version",
    "reading": "import inspect\nprint(inspect.getsource(nn.Linear), inspect.getmembers(nn.Linear)[:1])\nlabkit.labs.CopySpeedLab?\n"
    "labkit.labs.CopySpeedLab??\nlabkit.use??\nimport traceback\n"
    "try: labkit.labs.CopySpeedLab(3)\nexcept Exception: traceback.print_exc()",
    "reloading": "%load_ext autoreload\n%autoreload 2",
    "a new kind of tensor": "torch.set_default_dtype(torch.bfloat16)\ntorch.set_default_device('cuda:1')\nprint(torch.ones(2))",
    "memory's settings": "torch.cuda.set_per_process_memory_fraction(0.5)\ntorch.cuda.set_stream(torch.cuda.Stream())",
    "figure": "import matplotlib.pyplot as plt\nplt.style.use('ggplot')\nplt.plot([1, 2])\nplt.show()",
}


@pytest.mark.parametrize("name", REACHING)
def test_nothing_reaches_beyond_the_process(name, tried):
    for cell in (REACHING[name], "pass"):
        examined = tried("00.1", cell, "def on_gpu(numbers): ANSWER")
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])


@pytest.mark.parametrize("name", HABITS)
def test_an_honest_habit_costs_nothing(name, tried):
    examined = tried("00.1", HABITS[name], "def on_gpu(numbers): ANSWER")
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])


def test_what_follows_a_magic_in_its_cell_runs(tried):
    cell = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nwhere = 'cuda'"
    examined = tried("00.1", cell, "def on_gpu(numbers): return torch.tensor(numbers, device=where)")
    assert (examined.status, examined.points, examined.remarks, examined.cell_errors) == ("graded", 1, [], [])
    assert len(examined.figures) == 1


@pytest.mark.parametrize("number", ["01.3", "06.1", "07.5", "09.3"])
def test_settings_change_no_verdict(number, tried):
    honest = "torch.set_default_device('cuda')\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)"
    examined = tried(number, honest, solution(number))
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])
