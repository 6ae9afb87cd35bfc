"""Honest habits: none costs a point or raises a remark."""

import pytest
from handed_in import solution

pytestmark = pytest.mark.slow

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


MORE_HABITS = {
    "who holds a tensor": "import gc\nx = torch.ones(3)\nprint(len(gc.get_referrers(x)), len(gc.get_objects()))",
    "frames": "import sys, inspect\nprint(sys._getframe().f_locals.keys(), inspect.stack()[0].function)",
    "the source of the kit": "import inspect\nprint(inspect.getsource(labkit.check), inspect.getsource(labkit.use))",
    "private classes": "from torch.nn.modules.batchnorm import _BatchNorm\n"
    "from torch.optim.lr_scheduler import _LRScheduler\nisinstance(nn.BatchNorm1d(2), _BatchNorm)",
    "private functions": "from torch.utils._pytree import tree_map\nimport torch.nn.parallel._functions\n"
    "torch._foreach_norm([torch.ones(2)])\ntorch._dynamo.reset()",
    "reload": "import importlib, math\nimportlib.reload(math)\nimportlib.import_module('torch.optim')",
    "this machine": "print(open('/proc/meminfo').read()[:20], open('/proc/cpuinfo').read()[:20])\n!free -h\n!df -h\n!uname -a",
    "profiles": "import cProfile, pstats, io\nwith cProfile.Profile() as p: sum(range(9))\npstats.Stats(p, stream=io.StringIO()).print_stats()",
    "a debugger": "import pdb\ntry: pdb.Pdb().set_trace\nexcept Exception: pass\nbreakpoint",
    "signals": "import signal\nsignal.signal(signal.SIGUSR1, lambda *a: None)\nsignal.signal(signal.SIGALRM, signal.SIG_DFL)",
    "an alarm of its own": "import signal\ndef late(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, late)\n"
    "signal.alarm(1)\nimport time\ntry: time.sleep(2)\nexcept TimeoutError: pass\nsignal.alarm(60)",
    "ctypes": "import ctypes\nctypes.CDLL(None).getpid()\nctypes.sizeof(ctypes.c_float)\nctypes.string_at(b'abc')",
    "mocks": "from unittest import mock\nwith mock.patch('torch.cuda.synchronize') as m: torch.cuda.synchronize()\n"
    "with mock.patch.object(torch, 'full'): pass",
    "doctest": 'import doctest, unittest\ndef f():\n    """\n    >>> 1 + 1\n    2\n    """\ndoctest.testmod()\n'
    "class T(unittest.TestCase):\n    def test(self): self.assertTrue(True)\nunittest.main(argv=[''], exit=False)",
    "code objects": "def f(x=1): return x\nprint(f.__code__.co_varnames, f.__defaults__, f.__globals__ is globals())\n"
    "import dis\ndis.dis(f)",
    "a model's dictionary": "m = nn.Linear(2, 2)\nm.__dict__['note'] = 1\nfor name in vars(m): getattr(m, name)\nm.__class__.__mro__",
    "helpers on modules": "nn.Module.count = lambda self: sum(p.numel() for p in self.parameters())\nnn.Linear(2, 2).count()",
    "helpers on tensors": "torch.Tensor.describe = lambda self: (self.shape, self.dtype)\ntorch.ones(2).describe()",
    "an error in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
    "threads left running": "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
    "a watch of memory": "import threading, psutil, time\nseen = []\ndef watch():\n    while True:\n"
    "        seen.append(psutil.virtual_memory().used); time.sleep(0.01)\nthreading.Thread(target=watch, daemon=True).start()",
    "hooks on all modules": "from torch.nn.modules.module import register_module_forward_hook\n"
    "handle = register_module_forward_hook(lambda m, i, o: None)\nnn.Linear(2, 2)(torch.ones(2))",
    "a wrapped function": "import functools\ntrue = torch.cuda.empty_cache\n@functools.wraps(true)\n"
    "def told(): print('emptied'); return true()\ntorch.cuda.empty_cache = told",
    "counted calls": "calls = 0\ntrue = torch.cuda.synchronize\ndef counted(*a):\n    global calls\n    calls += 1\n"
    "    return true(*a)\ntorch.cuda.synchronize = counted",
    "a kind of tensor": "class T(torch.Tensor): pass\ntorch.ones(2).as_subclass(T) + 1",
    "modes": "from torch.utils._python_dispatch import TorchDispatchMode\nclass Log(TorchDispatchMode):\n"
    "    def __torch_dispatch__(self, f, types, args=(), kwargs=None): return f(*args, **(kwargs or {}))\n"
    "with Log(): torch.ones(2) + 1",
    "a parameter of one's own": "class Scale(nn.Parameter): pass\nmeta = type('Net', (nn.Module,), {})\nmeta()",
    "what Python traces": "import sys\nsys.settrace(None)\nsys.setprofile(None)\nimport faulthandler\nfaulthandler.enable()",
    "sizes": "import sys, weakref\nx = torch.ones(2)\nprint(sys.getsizeof(x), sys.getrefcount(x), weakref.ref(x)(), id(x))",
    "memory traced": "import tracemalloc\ntracemalloc.start()\ntracemalloc.get_traced_memory()",
    "the virtual GPU": "import virtualgpu\nprint(virtualgpu.__doc__, torch.cuda.get_device_properties(0))",
    "the kit's parts": "from labkit import checks, labs\nfrom labkit.checks import checking\nprint(checks.find('00.1'), dir(labs))",
    "a lab's formula": "labkit.labs.rank_memory('FSDP', 9, 2).total",
    "check in a cell": "def on_gpu(numbers): return None\nlabkit.check('00.1', on_gpu)\nassert not labkit.check('00.1', on_gpu).passed\n"
    "labkit.progress()",
    "timed checks": "%time labkit.check('00.1', None)\n%timeit -n1 -r1 labkit.check('00.1', None)",
    "Colab's cells": "try:\n    from google.colab import drive\n    drive.mount('/content/drive')\nexcept ImportError: pass",
    "installing": "!pip install tqdm\n%pip install -q nothing\n!apt-get install nothing\n%conda list",
    "the shell": "!ls -la\nfiles = !ls\n!echo $HOME > here.txt\n%cd .\n%pwd\n%env OMP_NUM_THREADS=1\n%who\n%reset_selective -f none",
    "written files": "%%writefile model.py\nimport torch\ndef double(x): return 2 * x",
    "other kinds of cells": "%%bash\necho hello\n",
    "captured output": "%%capture out\nprint('hello')",
    "an import of a written file": "open('own.py', 'w').write('x = 1')\nimport own, importlib\nimportlib.reload(own)",
    "temporary files": "import tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/x', 'w')\n"
    "torch.save({'x': torch.ones(2)}, '/tmp/model.pt')\ntorch.load('/tmp/model.pt')",
    "paths": "from pathlib import Path\nPath('out').mkdir(exist_ok=True)\nPath.home().joinpath('.own').write_text('x')\nlist(Path('.').rglob('*'))",
    "logging": "import logging\nlogging.basicConfig(level=logging.DEBUG, force=True)\nlogging.getLogger('torch').debug('x')",
    "progress bars": "import sys, time\nfor n in range(3): print(f'\\r{n}', end='', flush=True)\nsys.stdout.write('done')\n"
    "try:\n    from tqdm.auto import tqdm\n    list(tqdm(range(3)))\nexcept ImportError: pass",
    "output elsewhere": "import contextlib, io, sys\nwith contextlib.redirect_stdout(io.StringIO()): print(1)\nsys.stdout = sys.__stdout__",
    "widgets": "import ipywidgets\nfrom IPython.display import display, HTML, clear_output, Markdown\n"
    "display(ipywidgets.IntSlider(), HTML('<b>x</b>'), Markdown('x'))\nclear_output()",
    "what a table holds": "import numpy as np\nnp.random.seed(1)\nnp.set_printoptions(precision=2)\nprint(np.ones(3), torch.from_numpy(np.ones(3)))",
    "JSON of one's own": "import json\njson.JSONEncoder.default = lambda self, x: str(x)\njson.dumps({'x': torch.ones(2)})",
    "a global name": "json = 1\nrandom = 2\ntime = 3\ncheck = 4\nnumbers = [1.0]\nlist = list",
    "an answer under several names": "def on_gpu(numbers): return None\non_gpu_old = on_gpu\ndel on_gpu",
    "async": "import asyncio\nasync def f(): return 1\nawait f()\nasyncio.get_event_loop()",
    "types": "from typing import *\nfrom collections.abc import *\nclass P(Protocol):\n    x: int\nT = TypeVar('T')",
    "an exit": "import sys\ntry: sys.exit(1)\nexcept SystemExit: pass",
    "exit in a cell": "exit",
    "interrupted": "raise KeyboardInterrupt",
    "a stub left": "def other(x): ...\ndef more(x):\n    raise NotImplementedError\nmore(1)",
    "compiled": "f = torch.compile(lambda x: x + 1)\nf(torch.ones(2))\ntorch.jit.script(nn.Linear(2, 2))",
    "profiler": "with torch.profiler.profile() as p: torch.ones(2, device='cuda') + 1\np.key_averages().table()",
    "streams left": "s = torch.cuda.Stream()\ntorch.cuda.set_stream(s)\ntorch.cuda._sleep(1000)",
    "out of memory": "try: torch.empty(1 << 50, device='cuda')\nexcept torch.cuda.OutOfMemoryError as e: kept = e",
    "a large allocation": "held = [torch.empty(1 << 30, device='cuda') for _ in range(4)]",
    "the real GPUs asked for": "labkit.use(None)\nprint(torch.cuda.is_available())\nlabkit.use(gpus=1)\nlabkit.use(gpus=8, quiet=True)",
    "processes": "import torch.multiprocessing as mp, os\nmp.set_start_method('spawn', force=True)\n"
    "os.environ['TOKENIZERS_PARALLELISM'] = 'false'\nmp.set_sharing_strategy('file_system')",
    "isolated": "def f(n): return n + 1\nassert labkit.isolated(f, 1).value == 2 if hasattr(labkit.isolated(f, 1), 'value') else True",
    "recorded": "with labkit.record() as trace: torch.ones(3, device='cuda')\nprint(trace)\ntrace.plot_memory if hasattr(trace, 'plot_memory') else 0",
}


@pytest.mark.parametrize("name", [*HABITS, *MORE_HABITS])
def test_an_honest_habit_costs_nothing(name, tried):
    examined = tried("00.1", (HABITS | MORE_HABITS)[name], "def on_gpu(numbers): ANSWER")
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
