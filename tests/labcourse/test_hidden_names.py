"""What a notebook reaches for is noticed where no text of its says so: names in pieces, other programs, other threads, other processes."""

import pytest
from handed_in import solution

pytestmark = pytest.mark.slow

OK = "def on_gpu(numbers): ANSWER"
KIT = "kit = get_ipython().user_ns['lab' + 'kit']\n"
TRACEBACK = "try: 1 / 0\nexcept ZeroDivisionError as error: held = error.__traceback__\n"
RANKS = "def ranks_needed(parameters, layer, memory):\n    n = 1\n"
RANKS += "    while way('FSDP', parameters, n).total + 8 * layer > memory: n += 1\n    return n"


def inside(source: str) -> str:
    """A right answer that does this too."""
    return "def on_gpu(numbers):\n" + "".join(f"    {line}\n" for line in source.splitlines()) + "    ANSWER"


FORMULA = {  # ways to the kit's own formula
    "sys by another module": "import unittest.loader\nway = unittest.loader.sys.modules['lab' + 'kit.labs.sharding'].rank_memory",
    "a program with another name for sys": "import sys\ns = sys\nway = eval('s.mod' + 'ules')['lab' + 'kit.labs.sharding'].rank_memory",
    "the module of what is public": "import inspect\nway = inspect.getmodule(labkit.labs.plot_held_by_ranks).rank_memory",
    "an annotation": "import typing\nclass A:\n    x: 'rank_memory'\nA.__module__ = 'lab' + 'kit.labs.sharding'\n"
    "way = typing.get_type_hints(A)['x']",
    "an entry point": "from importlib.metadata import EntryPoint\n"
    "way = EntryPoint('x', 'lab' + 'kit.labs.sharding:rank_memory', 'g').load()",
    "members of a module": "import inspect\nway = dict(inspect.getmembers(labkit.labs))['rank_' + 'memory']",
    "IPython's own search": "way = get_ipython()._ofind('lab' + 'kit.labs.rank_memory').obj",
}
ORDER = "def one_forward_one_backward(stage, stages, micro_batches): return table[stage, stages, micro_batches]"
FOUND = (  # in the room while cells run, by a way that nothing tells of
    "import inspect, sys\nget = dict(inspect.getmembers(type(labkit).mro()[-1]))['__getattri' + 'bute__']\n"
    "kit = get(sys, 'mod' + 'ules')['lab' + 'kit.labs.schedules']\nway, kind = get(kit, 'order'), get(kit, 'ONE_F_ONE_B')\n"
)
TABLE = "table = {(s, n, m): [f'{a[0].upper()}{b + 1}' for a, b in CALL] for n in range(2, 9) for s in range(n) for m in range(1, 20)}"
CALLS = {
    "by itself": "way(kind, s, n, m)",
    "by another function": "next(map(way, *[[x] for x in (kind, s, n, m)]))",
    "in a thread": "ThreadPoolExecutor(1).submit(way, kind, s, n, m).result()",
}
RIGHT_AND_MORE = {  # the answer is right; what else is done must show
    "members of a traceback": inside(TRACEBACK + "import inspect\ndict(inspect.getmembers(held))['tb_fr' + 'ame']"),
    "a format in pieces": inside(TRACEBACK + "('{' + '0.tb_fr' + 'ame.f_ba' + 'ck' + '}').format(held)"),
    "a formatter that keeps what it formats": inside(
        TRACEBACK + "import string\nclass F(string.Formatter):\n    def format_field(self, value, spec): return ''\n"
        "F().format('{' + '0.tb_fr' + 'ame' + '}', held)"
    ),
    "a syntax tree": inside(
        "import ast\nt = ast.parse('print.x', mode='eval')\nt.body.attr = '__se' + 'lf__'\neval(compile(t, '<x>', 'eval'))"
    ),
    "a thread of a library": inside(
        "from concurrent.futures import ThreadPoolExecutor as T\nT(1).submit(eval, 'print.__se' + 'lf__').result()"
    ),
    "a module asked in a thread": (
        KIT + "import threading\nfrom operator import attrgetter\nt = threading.Thread(target=attrgetter('machine'), args=(kit,))\n"
        "t.start(); t.join()",
        OK,
    ),
    "cells that a transformer rewrites": (
        "import ast\nclass T(ast.NodeTransformer):\n    def visit_Attribute(self, node):\n"
        "        node.attr = node.attr.replace('xyz', '__se' + 'lf__')\n"
        "        return node\nget_ipython().ast_transformers.append(T())",
        "print.xyz",
        OK,
    ),
    "reports that are too many": ("for i in range(400): eval(str(i))", "eval('print.__se' + 'lf__')", OK),
    "a program that is too long": ("eval(' ' * 500000 + 'print.__se' + 'lf__')", OK),
    "a text that says it is another": ("class S(str):\n    def __str__(self): return 'x'\ngetattr(print, S('__se' + 'lf__'))", OK),
    "compiled code in a zip file": (
        "import zipfile, py_compile, sys\nopen('a.py', 'w').write('x = 1')\npy_compile.compile('a.py', 'c.pyc')\n"
        "with zipfile.ZipFile('z.dat', 'w') as z: z.write('c.pyc', 'hidden.pyc')\nsys.path.insert(0, 'z.dat')\nimport hidden",
        OK,
    ),
    "a module that is watched no more": (KIT + "object.__setattr__(kit, '__cl' + 'ass__', type(torch).__base__)", OK),
    "a copy of a module": (KIT + "import copy\ntry: copy.copy(kit)\nexcept TypeError: pass", OK),
    "all of a module": (KIT + "vars(kit)", OK),
    "the kit's folder by another name": (
        "import os, sys\nos.symlink(next(p for p in map(lambda p: p + '/lab' + 'kit', sys.path) if os.path.isdir(p)), 'k')\n"
        "open('k/machine.py').read()",
        OK,
    ),
    "the virtual GPU by a tensor's attribute": inside("getattr(torch.ones(1, device='cuda'), '_g' + 'pu').allocator"),
    "a name replaced and put back": inside(
        "u = get_ipython().user_ns['to' + 'rch'].cuda\ntrue = u._sleep\nu._sleep = lambda cycles: None\nu._sleep = true"
    ),
    "names for a template": (
        "from jinja2.nativetypes import NativeEnvironment\n"
        "NativeEnvironment().from_string('{{ f|attr(a ~ b) }}').render(f=print, a='__se', b='lf__')",
        OK,
    ),
    "names for a traced module": ("import torch.fx\ntorch.fx.Interpreter.fetch_attr", OK),
    "names for a wrapper": ("import functools\nfunctools.wraps(labkit.check, assigned=('__glo' + 'bals__',), updated=())(nn.Module())", OK),
    "members of a module's class": ("import inspect\ndict(inspect.getmembers(type(labkit)))['__getattri' + 'bute__']", OK),
    "names of a class of Python's": ("vars(object)['__getattri' + 'bute__'](labkit, 'machine')", OK),
    "a module in torch, by pickle": ("import pickle\npickle.loads(b'\\x80\\x04\\x8c\\x05torch\\x8c\\x0bsys.modules\\x93.')", OK),
    "what all modules compute": inside(
        "from torch.nn.modules.module import register_module_forward_hook\nregister_module_forward_hook(lambda module, given, output: None)"
    ),
    "the kit's source, line by line": (
        "import linecache, os, sys\nfolder = next(p for p in sys.path if os.path.isdir(p + '/labkit'))\n"
        "assert linecache.getlines(folder + '/labkit/labs/schedules.py')",
        OK,
    ),
    "a tensor with a method of its own": (
        "def on_gpu(numbers):\n    x = torch.tensor(numbers, device='cuda')\n    x.tolist = lambda: numbers\n    return x"
    ),
    "a program": inside("import subprocess\nsubprocess.run(['true'])"),
    "a program by the kit": ("def f(n): return n", inside("labkit.isolated(f, 1)")),
    "a program by multiprocessing": inside(
        "import multiprocessing as mp\np = mp.get_context('spawn').Process(target=print)\np.start(); p.join()"
    ),
    "the line for reports moved": (
        "import os\nfor fd in range(3, 20):\n    try:\n        if os.readlink(f'/proc/self/fd/{fd}').startswith('pipe'):\n"
        "            os.dup(fd); os.dup2(os.open('/dev/null', 1), fd)\n    except OSError: pass\neval('print.__se' + 'lf__')",
        OK,
    ),
}


@pytest.mark.parametrize("name", FORMULA)
def test_the_kits_formula_is_not_at_hand_and_the_way_to_it_shows(name, tried):
    examined = tried("11.2", FORMULA[name], RANKS)
    assert (examined.status, examined.points) == ("suspect", 0), examined.remarks
    assert "the labs are not at hand" in examined.exercises[0]["message"]


@pytest.mark.parametrize("cell", ["way = labkit.labs.rank_memory", "from labkit.labs import rank_memory as way"])
def test_what_a_lesson_shows_of_the_labs_costs_nothing_and_answers_nothing(cell, tried):
    given = "print(labkit.labs.rank_memory('FSDP', 9, 2).total)"
    examined = tried("11.2", given, cell, RANKS, given=given)
    assert (examined.status, examined.points, examined.remarks) == ("graded", 0, [])
    assert "the labs are not at hand" in examined.exercises[0]["message"]
    examined = tried("11.2", given, cell, solution("11.2"), given=given)
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])


@pytest.mark.parametrize("name", RIGHT_AND_MORE)
def test_what_else_an_answer_does_is_noticed(name, tried):
    cells = RIGHT_AND_MORE[name]
    examined = tried("00.1", *([cells] if isinstance(cells, str) else cells))
    noticed = [remark for remark in examined.remarks if remark.startswith(("it did what no exercise needs", "tampered with"))]
    assert noticed, (examined.status, examined.points, examined.remarks)  # also where it took too long


@pytest.mark.parametrize("name", CALLS)
def test_the_kits_formula_tells_of_its_calls(name, tried):
    cell = "from concurrent.futures import ThreadPoolExecutor\n" + FOUND + TABLE.replace("CALL", CALLS[name])
    examined = tried("04.5", cell, ORDER)
    assert (examined.status, examined.points) == ("suspect", 1)
    assert any("labkit.labs.schedules.order, which is no part of the lessons" in remark for remark in examined.remarks)


@pytest.mark.parametrize("answer", ["return torch.ones(3_000_000, device='cuda')", "raise ValueError('x' * (1 << 26))"])
def test_an_answer_of_any_size_is_only_wrong(answer, tried):
    examined = tried("00.1", f"def on_gpu(numbers): {answer}")
    assert (examined.status, examined.points, examined.remarks) == ("graded", 0, [])


def test_what_cells_start_does_not_outlive_them(tried):
    running = "import psutil\n_, alive = psutil.wait_procs(psutil.Process().children(), timeout=20)\nassert not alive"
    examined = tried("00.1", "import subprocess\nsubprocess.Popen(['sleep', '1000'])", inside(running))
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])
