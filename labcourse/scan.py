"""What a notebook's own code says that no exercise needs, told from its text: it reaches for frames, for insides of Python and the kit, for
the line to the grader, or puts something in the place of what answers are measured with.

None of it is forbidden, and a person decides: a notebook may have a reason.
"""

import ast
import contextlib
import re
import threading
import warnings
from collections.abc import Iterable

FRAMES = (
    "_getframe _current_frames currentframe f_back f_locals f_globals f_builtins tb_frame gi_frame cr_frame ag_frame settrace setprofile"
)
FRAMES += " walk_stack walk_tb getouterframes getinnerframes capture_locals get_stack"
INSIDES = "get_objects get_referrers get_referents __closure__ cell_contents __globals__ __code__ __defaults__ __kwdefaults__ __wrapped__"
INSIDES += " __self__ getclosurevars getattr_static get_field"
INSIDES += " __get__ fget __getstate__ __reduce_ex__ ModuleType"
INSIDES += " __builtins__ __subclasses__ __getattribute__ __import__ __loader__ __spec__ addaudithook find_class"
TENSORS = "as_subclass _make_subclass _make_wrapper_subclass TorchFunctionMode TorchDispatchMode __torch_function__ __torch_dispatch__"
GPUS = "_gpu _virtual _installation"
HOOKS = " ".join(f"register_module_{kind}_hook" for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward", "backward"))
HOOKS += " register_optimizer_step_pre_hook register_optimizer_step_post_hook"
LINES = "dup2 closerange fromfd recv_fds send_fds"
NAMES = {
    name: what
    for what, names in {
        "frames above it": FRAMES,
        "insides of Python": INSIDES,
        "tensors that pose as others": TENSORS,
        "insides of the virtual GPU": GPUS,
        "what all modules compute": HOOKS,
        "the line to the grader": LINES,
    }.items()
    for name in names.split()
}
MODULES = {"ctypes", "_ctypes", "cffi", "marshal", "importlib", "imp", "runpy", "pkgutil", "pdb", "bdb", "signal", "labcourse", "mock"}
MODULES |= {
    "_posixsubprocess",
    "torch._dynamo",
    "torch.library",
    "torch.overrides",
    "torch.utils._python_dispatch",
    "unittest.mock",
    "sys.modules",
    "sys.monitoring",
}
MODULES |= {
    "jinja2",  # it and torch.fx look up attributes by names in texts
    "torch.fx",
    "sys.meta_path",
    "gc.callbacks",
    "pickle.Unpickler",
    "copyreg",
    "_signal",
    "_pytest",
    "pytest.MonkeyPatch",
    "pydoc",
    "logging.config",
}
HIDDEN = {"ctypes", "_ctypes", "importlib", "signal", "_signal"}  # also where they stand in other modules
MAKING_UP = {"operator.attrgetter", "operator.methodcaller"}  # reach attributes by names in texts
MADE_FIELD = re.compile(r"\{[\w.\[\]]*\.(_|[^{}:!]*$)")  # the text of a field of str.format that is private, or goes on elsewhere
KIT = {"virtualgpu", "gputrace", "labkit"}
# What the lessons use of the kit; and labs, which are classes, their figures, and what was recorded.
LESSONS = "check progress use current host_time record isolated torchrun races labs find_leaks holders trace Verdict gpus __version__"
LESSONS += " lessons Isolated IsolatedError TorchrunError Trace"
PUBLIC = {f"{package}.{name}" for package in ("labkit", "gputrace") for name in LESSONS.split()} | {*KIT, "labkit.magics"}
LABS = re.compile(r"labkit\.labs(\.([A-Z]\w*|plot_\w+|collect|recorded_result))?")
CLASS = re.compile(r"labkit\.labs\.[a-z_]+\.[A-Z]\w*")  # where it lies, as help asks for it
SHOWING = {"print", "pprint", "display", "len", "sorted"}  # what gives no more than text or names of a __dict__
BUILTINS = {"getattr", "setattr", "delattr", "eval", "exec", "compile", "__import__", "globals", "open", "id", "type", "object", "vars"}
MEASURED = ("torch", *KIT, "json", "builtins", "math", "time", "random")  # what answers are measured with
COSMETIC = {"print", "__repr__", "__str__", "__format__", "load", "save", "set_printoptions", "show"}
# Underscored, and ordinary all the same.
PRIVATE = {"torch._assert", "torch.cuda._sleep", "torch._foreach_add_", "torch._foreach_mul_"}
PRIVATE |= {f"torch.cuda.memory.{name}" for name in ("_record_memory_history", "_snapshot", "_dump_snapshot")}


LONGEST = 1 << 20  # characters of all that is read
PARSING = threading.Lock()  # Python 3.11 fails where two threads parse at once, and one is interrupted by the other


def remarks(sources: Iterable[str]) -> list[str]:
    """What these cells or programs hold of that, each once, in order."""
    sources, trees = list(sources), list[ast.AST]()
    if sum(map(len, sources)) > LONGEST:
        return ["its code is too long to be read"]
    for source in sources:
        with PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the submission's own text
            try:
                trees.append(ast.parse(source))
            except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
                continue  # it does not run either
    try:
        reader = _Reader(trees)
        for tree in trees:
            reader.visit(tree)
        return list(dict.fromkeys(reader.found))
    except RecursionError:
        return ["its code is nested too deeply to be read"]


def texts(sources: Iterable[str]) -> list[str]:
    """The texts in these cells, which may be programs."""
    found: list[str] = []
    for source in sources:
        with PARSING, contextlib.suppress(SyntaxError):
            constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
            found += [value for value in constants if isinstance(value, str)]
    return found


def cells(sources: list[str]) -> list[str]:
    """The Python in notebook cells, where magics and commands stand too."""
    from IPython.core.inputtransformer2 import TransformerManager

    def plain(source: str) -> str:
        lines = source.splitlines(keepends=True)
        if lines and lines[0].startswith("%%"):
            source = "".join(lines[1:])  # what stands below it is timed, captured, profiled
        try:
            return TransformerManager().transform_cell(source)
        except Exception:  # it does not run either
            return source

    return [plain(source) for source in sources]


def of_name(name: str) -> str:
    """What is said of an attribute or a name, or ""."""
    return f"it reaches for {NAMES[name]} ({name})" if name in NAMES else ""


def of_path(path: str, writes: bool = False) -> str:
    """What is said of a name from a module on, such as torch.cuda.memory_allocated, that is read, or replaced."""
    parts = path.split(".")
    root, last = parts[0], parts[-1]
    heads = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    if (used := heads & MODULES) and "importlib.metadata" not in heads:
        return f"it uses {min(used)}"
    if root not in ("torch", "scipy") and (used := HIDDEN & set(parts[1:])):
        return f"it uses {min(used)}"
    if writes and root in MEASURED and last not in COSMETIC and len(parts) > 1 and not path.startswith("torch.backends."):
        return f"it replaces {path}"
    if root == "builtins" and len(parts) > 1 and last in BUILTINS:
        return f"it uses {path}"
    public = ".".join(parts[:2]) in PUBLIC - {"labkit.labs"} or LABS.fullmatch(".".join(parts[:3])) or CLASS.fullmatch(path)
    if root in KIT and (not public or "machine" in parts) and last not in ("__doc__", "__file__", "__name__"):
        return f"it uses {path}, which is no part of the lessons"
    if "__dict__" in parts[1:]:
        return f"it uses {path}"
    private = [part for part in parts[1:] if part.startswith("_") and not part.endswith("__")]
    if root in MEASURED and private and not heads & PRIVATE:
        return f"it uses {path}"
    return ""


def making_up(path: str) -> str:
    return f"it makes up attributes' names ({path})" if path in MAKING_UP else ""


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "id", getattr(node.func, "attr", "")))


class _Reader(ast.NodeVisitor):
    """Follows imports and names that stand for modules, and notes what is reached from them."""

    def __init__(self, trees: Iterable[ast.AST]) -> None:
        self.found: list[str] = []
        self._stands_for = {name: name for name in ("torch", "nn", *KIT, "sys", "builtins", "gc", "os")} | {"nn": "torch.nn"}
        self._stands_for |= {"type": "builtins.type", "object": "builtins.object"}
        nodes = [node for tree in trees for node in ast.walk(tree)]
        for node in nodes:  # names first: a function may use what is imported below it, or in another cell
            if isinstance(node, ast.Import):
                for item in node.names:
                    self._stands_for[item.asname or item.name.partition(".")[0]] = item.name if item.asname else item.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom):
                for item in node.names:
                    self._stands_for[item.asname or item.name] = f"{node.module}.{item.name}"
                    if item.name == "*" and node.module in KIT:
                        self._stands_for |= {name: f"{node.module}.{name}" for name in LESSONS.split()}
        self._shown = {id(argument) for node in nodes if isinstance(node, ast.Call) for argument in node.args if _called(node) in SHOWING}
        self._shown |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "keys"}
        self._classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        for node in nodes:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "optional_vars", None)  # of a `with`
            value = node.value if isinstance(node, ast.Assign) else getattr(node, "context_expr", None)
            if isinstance(target, ast.Name) and value is not None and (path := self._path(value)):
                self._stands_for.setdefault(target.id, path)

    def _path(self, node: ast.AST) -> str:
        """What a dotted name stands for, from a module on; "" for what begins with something else."""
        if isinstance(node, ast.Name):
            return self._stands_for.get(node.id, "")
        if isinstance(node, ast.Call):  # what a function of the kit returns
            made = self._path(node.func)
            return made if made.partition(".")[0] in KIT else ""
        above = self._path(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{above}.{node.attr}" if above and isinstance(node, ast.Attribute) else ""

    def _note(self, *told: str) -> None:
        self.found += [text for text in told if text]

    def visit_Import(self, node: ast.Import) -> None:
        self._note(*(of_path(item.name) for item in node.names))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for item in node.names:
            path = f"{node.module}.{item.name}"
            self._note(of_path(path if path != "labkit.*" else "labkit"), of_name(item.name))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(of_name(node.attr))
        if node.attr == "__dict__" and id(node) not in self._shown and getattr(node.value, "id", "") != "self":
            self._note("it reaches for insides of Python (__dict__)")
        if path := self._path(node):
            self._note(of_path(path, writes=not isinstance(node.ctx, ast.Load)), making_up(path))
        if not path or isinstance(node.value, ast.Call):
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(of_name(node.id), making_up(self._path(node)))

    def visit_keyword(self, node: ast.keyword) -> None:
        self._note(of_name(node.arg or ""))
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Whether a module is there, as notebooks ask that also run on Colab."""
        looking = len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn) and self._path(node.comparators[0]) == "sys.modules"
        self.visit(node.left) if looking else self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self._note(*map(of_name, node.kwd_attrs))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """An attribute's name can be a text."""
        if isinstance(node.value, str) and len(node.value) < 2000:
            self._note(*map(of_name, re.findall(r"\w+", node.value)))
            if re.fullmatch(rf"(?:{'|'.join(KIT)})\.[\w.]*", node.value):
                self._note(of_path(node.value))
            if MADE_FIELD.search(node.value):
                self._note("it makes up attributes' names (str.format)")
            if re.search(r"/proc/|/dev/fd|\.ipynb\b", node.value):
                self._note(f"it names {node.value[:80]!r}")

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path, name = self._path(node.func), _called(node)
        known = [argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)]
        if name in ("getattr", "setattr", "delattr") and len(node.args) > 1 and known and (owner := self._path(node.args[0])):
            self._note(of_path(f"{owner}.{known[0]}", writes=name != "getattr"))
        if name == "type" and len(node.args) == 3:
            self._note(*map(self._of_base, getattr(node.args[1], "elts", [])))
        if path in ("os.write", "os.read", "os.fdopen", "os.close", "os.dup") and not self._is_standard(node.args[:1]):
            self._note("it reaches for the line to the grader (os)")
        if (usual := {"functools.update_wrapper": 2, "functools.wraps": 1}.get(path)) and len(node.args) + len(node.keywords) > usual:
            self._note(f"it copies attributes ({path})")
        if name == "super" and node.args and [getattr(argument, "id", "") for argument in node.args] != ["cls", "self"]:
            self._note("" if getattr(node.args[0], "id", "") in self._classes else "it reaches for insides of Python (super)")
        if name == "getmembers" and any(isinstance(part, ast.Call) and _called(part) == "type" for part in node.args):
            self._note("it reaches for insides of Python (getmembers of a type)")
        if name == "vars" and node.args and self._path(node.args[0]).partition(".")[0] in (*MEASURED, "operator", "types"):
            self._note(f"it uses vars of {self._path(node.args[0])}")
        plain = making_up(path) and all(isinstance(argument, ast.Constant) for argument in node.args)
        for child in [*node.args, *node.keywords] if plain else [node]:
            self.generic_visit(child) if child is node else self.visit(child)

    @staticmethod
    def _is_standard(arguments: list[ast.expr]) -> bool:
        return bool(arguments) and isinstance(arguments[0], ast.Constant) and arguments[0].value in (1, 2)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._note(*map(self._of_base, node.bases))
        self.generic_visit(node)

    def _of_base(self, node: ast.AST) -> str:
        path = self._path(node) or getattr(node, "id", "")
        return (
            f"it makes a kind of {path}" if path in ("torch.Tensor", "torch.nn.Parameter", "torch.nn.parameter.Parameter", "Tensor") else ""
        )

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Subscript) and (path := self._path(target.value)).endswith(".__dict__"):
                self._note(f"it writes into {path}")
