"""What students may try: none earns a point in silence, stops the grading, or touches another's marks; and honest habits cost nothing."""

import pytest
from handed_in import solution

pytestmark = pytest.mark.slow

# Points without the work: the exercise, what it asks for, and a notebook's cells, the last of which answers.
EXPECTED_VALUES = {
    "the due time in a caller's frame": ("02.1", "import sys", "def seconds_of(work): return sys._getframe(1).f_locals['due']"),
    "frames by a traceback": (
        "02.1",
        "def seconds_of(work):\n    try: raise ValueError\n    except ValueError as error: frame = error.__traceback__.tb_frame\n"
        "    while 'cycles' not in frame.f_locals: frame = frame.f_back\n    return sum(frame.f_locals['cycles']) / 1.59e9",
    ),
    "frames by a generator": ("00.1", "def on_gpu(numbers):\n    g = (g.gi_frame.f_back for _ in [1])\n    next(g)\n    ANSWER"),
    "frames by inspect": ("00.1", "import inspect", "def on_gpu(numbers):\n    inspect.stack()[2].frame\n    ANSWER"),
    "frames by a name in two pieces": (
        "00.1",
        "import sys",
        "def on_gpu(numbers):\n    getattr(sys, '_get' + 'frame')(2)\n    ANSWER",
    ),
    "frames by a program in a text": ("00.1", "def on_gpu(numbers):\n    exec('import sy' + 's; sys._getfr' + 'ame(2)')\n    ANSWER"),
    "frames by a signal": (
        "00.1",
        "import signal",
        "def on_gpu(numbers):\n    signal.signal(signal.SIGUSR1, lambda n, frame: frame.f_back)\n    ANSWER",
    ),
    "frames by a tracer": ("00.1", "import sys", "def on_gpu(numbers):\n    sys.setprofile(lambda *a: None)\n    ANSWER"),
    "the defaults of the work": (
        "02.1",
        "def seconds_of(work):\n    torch.cuda.synchronize()\n    return sum(work.__defaults__[0]) / 1.59e9",
    ),
    "the closure of the work": ("00.1", "def on_gpu(numbers):\n    labkit.check.__closure__\n    ANSWER"),
    "the collector's objects": ("00.1", "import gc", "def on_gpu(numbers):\n    gc.get_objects()\n    ANSWER"),
    "the signature of what it was lent": (
        "09.5",
        "import inspect",
        "def most_rows(peak, limit):\n    case = inspect.signature(peak).parameters['case'].default\n"
        "    return max(0, (limit - case['fixed']) // case['row'])",
    ),
    "frames by a signal of another module's": (
        "00.1",
        "import subprocess, operator",
        "def on_gpu(numbers):\n    get = operator.attrgetter('f_' + 'back.f_' + 'locals')\n"
        "    subprocess.signal.signal(10, lambda n, frame: get(frame))\n    ANSWER",
    ),
    "an attribute whose name is made up": (
        "00.1",
        "from operator import attrgetter as reach\nnames = reach('__glo' + 'bals__')(labkit.check)",
        "def on_gpu(numbers): ANSWER",
    ),
    "an attribute in a format": ("00.1", "print(('{0.__glo' + 'bals__}').format(labkit.check)[:9])", "def on_gpu(numbers): ANSWER"),
    "all classes by the class of classes": (
        "00.1",
        "[c for c in type.__dict__['__sub' + 'classes__'](object) if c.__name__ == '_Session']",
        "def on_gpu(numbers): ANSWER",
    ),
    "a module of its own": (
        "00.1",
        "open('mine.py', 'w').write('def above(frame): return frame.f_' + 'back')\nimport mine",
        "def on_gpu(numbers): ANSWER",
    ),
    "a compiled module of its own": (
        "00.1",
        "import py_compile\nopen('one.py', 'w').write('x = 1')\npy_compile.compile('one.py', 'two.pyc')\nimport two",
        "def on_gpu(numbers): ANSWER",
    ),
    "a cell that a cell makes up": (
        "00.1",
        "get_ipython().ev('labkit.check.__glo' + 'bals__')",
        "def on_gpu(numbers): ANSWER",
    ),
    "the kit's own formula": (
        "09.1",
        "from labkit.checks.lesson_09 import _bytes_of_training",
        "def training_bytes(model, optimizer): return sum(_bytes_of_training(model, optimizer).values())",
    ),
    "the kit's formula under another name": (
        "11.2",
        "import labkit.labs.sharding as s",
        "def ranks_needed(parameters, layer, memory):\n    n = 1\n"
        "    while s.rank_memory('FSDP', parameters, n).total + 4 * layer > memory: n += 1\n    return n",
    ),
    "the kit's formula by the labs": (
        "11.2",
        "def ranks_needed(parameters, layer, memory):\n    n = 1\n"
        "    while labkit.labs.rank_memory('FSDP', parameters, n).total + 4 * layer > memory: n += 1\n    return n",
    ),
    "the kit's formula by a star": (
        "11.2",
        "from labkit.labs import *",
        "def ranks_needed(parameters, layer, memory):\n    n = 1\n"
        "    while rank_memory('FSDP', parameters, n).total + 4 * layer > memory: n += 1\n    return n",
    ),
    "the kit's formula by a default": (
        "11.2",
        "def ranks_needed(parameters, layer, memory, kit=labkit.labs):\n    n = 1\n"
        "    while kit.rank_memory('FSDP', parameters, n).total + 4 * layer > memory: n += 1\n    return n",
    ),
    "the kit's formula by a text": (
        "11.2",
        "kit = eval('lab' + 'kit').labs",
        "def ranks_needed(parameters, layer, memory):\n    n = 1\n"
        "    while kit.rank_memory('FSDP', parameters, n).total + 4 * layer > memory: n += 1\n    return n",
    ),
    "the kit's schedule by a text": (
        "04.5",
        "kit = globals()['lab' + 'kit'].labs",
        "def one_forward_one_backward(stage, stages, micro_batches):\n    all_ = kit.schedules\n"
        "    return [w[0].upper() + str(i) for w, i in all_.order(all_.ONE_F_ONE_B, stage, stages, micro_batches)]",
    ),
    "the kit's schedule": (
        "04.5",
        "from labkit.labs.schedules import order, ONE_F_ONE_B",
        "def one_forward_one_backward(stage, stages, micro_batches):\n"
        "    return [w[0].upper() + str(i) for w, i in order(ONE_F_ONE_B, stage, stages, micro_batches)]",
    ),
    "the allocator's rules": (
        "05.1",
        "import virtualgpu.allocator.rules as rules",
        "def reserved_for(nbytes):\n    round_up = lambda n, k: -(-n // k) * k\n    n = round_up(nbytes, 512)\n"
        "    return 2 << 20 if n <= 1 << 20 else 20 << 20 if n < 10 << 20 else round_up(n, 2 << 20)",
    ),
    "the table of snippets": (
        "13.4",
        "from labkit.checks import lesson_13",
        "def outcomes(snippets): return [lesson_13.SNIPPETS[snippet] for snippet in snippets]",
    ),
    "the training that is due": (
        "13.3",
        "from labkit.checks.lesson_13 import _trained",
        "def train(model, batches):\n    loss = _trained(model, batches)\n    model.cuda()\n    return loss",
    ),
}
LIES = {
    "memory that lies once": (
        "05.2",
        "def first_rows(batches, count):\n    true = torch._C._cuda_memoryStats\n    def lie(device):\n"
        "        torch._C._cuda_memoryStats = true\n        s = true(device)\n        s['allocated_bytes']['all']['current'] = 0\n"
        "        return s\n    torch._C._cuda_memoryStats = lie\n    return [batch[:count] for batch in batches]",
    ),
    "memory that lies once, in pieces": (
        "05.2",
        "def first_rows(batches, count):\n    c = torch.cuda.memory\n    true = c.memory_stats\n"
        "    def lie(*a):\n        c.__dict__.update(memory_stats=true)\n        s = true(*a)\n"
        "        s['allocated_bytes.all.current'] = 0\n        return s\n"
        "    c.__dict__.update(memory_stats=lie)\n    return [batch[:count] for batch in batches]",
    ),
    "a clock that lies": (
        "01.5",
        "from labkit import machine",
        "def copy_while(source, device, work):\n    copy = source.to(device)\n    work()\n    true = machine.host_time\n"
        "    def lie():\n        machine.host_time = true\n        return 0.0\n    machine.host_time = lie\n    return copy",
    ),
    "a memory that is another figure of torch's": (
        "05.2",
        "torch.cuda.memory_allocated = torch.cuda.device_count",
        "def first_rows(batches, count): return [batch[:count] for batch in batches]",
    ),
    "a tensor that says it is elsewhere": (
        "00.1",
        "class Tensor(torch.Tensor):\n    device = property(lambda self: 'cuda:0')",
        "def on_gpu(numbers): return torch.tensor(numbers).as_subclass(Tensor)",
    ),
    "a tensor class made by type": (
        "00.1",
        "T = type('T', (torch.Tensor,), {'device': property(lambda self: 'cuda:0')})",
        "def on_gpu(numbers): return torch.Tensor._make_subclass(T, torch.tensor(numbers))",
    ),
    "a class that says it is the tensors'": (
        "00.1",
        "class T:\n    __module__ = 'torch'\n    __class__ = property(lambda self: torch.Tensor)\n"
        "    device, dtype = 'cuda:0', 'torch.float32'\n"
        "    detach = cpu = flatten = lambda self: self\n    tolist = lambda self: self.values\n"
        "    shape = property(lambda self: [len(self.values)])",
        "def on_gpu(numbers):\n    t = T()\n    t.values = list(numbers)\n    return t",
    ),
    "a tensor class from elsewhere": (
        "00.1",
        "B = torch.ones(1).__class__\nT = type(B)('Tensor', (B,), {'device': 'cuda:0', '__module__': 'torch'})",
        "def on_gpu(numbers):\n    t = torch.tensor(numbers)\n    t.__class__ = T\n    return t",
    ),
    "the virtual GPU behind a tensor": ("00.1", "def on_gpu(numbers):\n    torch.ones(1, device='cuda')._gpu.allocator\n    ANSWER"),
    "the virtual GPUs themselves": (
        "00.1",
        "import virtualgpu\nwith virtualgpu.use(2) as used: used.machine.clock",
        "def on_gpu(numbers): ANSWER",
    ),
    "a mode over all functions": (
        "00.1",
        "from torch.overrides import TorchFunctionMode\nclass Lie(TorchFunctionMode):\n"
        "    def __torch_function__(self, f, types, args=(), kwargs=None): return f(*args, **(kwargs or {}))",
        "def on_gpu(numbers):\n    Lie().__enter__()\n    ANSWER",
    ),
    "a number that is a class of its own": (
        "05.1",
        "class N(int):\n    def __eq__(self, other): return True",
        "def reserved_for(nbytes): return N(nbytes)",
    ),
    "JSON's encoder": (
        "00.1",
        "import json\ntrue = json.JSONEncoder.iterencode\n"
        "def lie(self, o, **k): return true(self, o, **k)\njson.JSONEncoder.iterencode = lie",
        "def on_gpu(numbers): ANSWER",
    ),
    "the session's class": (
        "00.1",
        "import sys\nsession = sys.modules['labcourse.session']\nsession._Session._answer = lambda self, question: {'observation': {}}",
        "def on_gpu(numbers): ANSWER",
    ),
    "the session found by its name alone": (
        "00.1",
        "import builtins\nm = builtins.__dict__['__imp' + 'ort__']('labcourse.session')",
        "def on_gpu(numbers): ANSWER",
    ),
    "the kit's measurements": (
        "00.1",
        "from labkit.checks import checking\nchecking.describe = lambda value: {}",
        "def on_gpu(numbers): ANSWER",
    ),
    "a proxy over the line": (
        "00.1",
        "import os, socket\nours, theirs = socket.socketpair()\nfor fd in range(3, 20):\n"
        "    try:\n        if os.readlink(f'/proc/self/fd/{fd}').startswith('socket') and fd not in (ours.fileno(), theirs.fileno()):\n"
        "            os.dup2(theirs.fileno(), fd)\n    except OSError: pass",
        "def on_gpu(numbers): ANSWER",
    ),
    "memory of the process by ctypes": ("00.1", "import ctypes", "def on_gpu(numbers):\n    ctypes.string_at(id(numbers), 8)\n    ANSWER"),
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


@pytest.mark.parametrize("name", [*EXPECTED_VALUES, *LIES])
def test_no_point_is_earned_in_silence(name, tried):
    examined = tried(*(EXPECTED_VALUES | LIES)[name])
    assert not examined.points or examined.status == "suspect", (examined.status, examined.points, examined.remarks)
    assert not examined.points or examined.remarks
    after = tried("00.1", "def on_gpu(numbers): ANSWER")
    assert (after.status, after.points, after.remarks) == ("graded", 1, [])


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
