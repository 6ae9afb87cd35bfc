"""`%%torchrun`: run a notebook's cell in several processes."""

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labkit.ranks import torchrun_cell


@magics_class
class TorchrunMagic(Magics):
    """The cell magic."""

    shell: Any  # IPython's

    @magic_arguments("%torchrun")
    @argument("-o", "--output", metavar="NAME", help="a variable for what `labkit.torchrun` returns")
    @argument("--ranks", type=int, default=2, help="how many in all (default: %(default)s)")
    @argument("--nodes", type=int, default=1, help="agents of torchrun among which they are divided (default: %(default)s)")
    @argument("--timeout", type=float, default=60, help="seconds that the ranks may run (default: %(default)s)")
    @argument("--max-restarts", type=int, default=0, help="start all ranks again when one fails (default: %(default)s times)")
    @argument("--devices", help="cuda or cpu (default: cuda if this computer has a GPU for each rank)")
    @argument("--live", action="store_true", help="print lines as they come, not in the order of the ranks")
    @no_var_expand
    @cell_magic
    def torchrun(self, line: str, cell: str) -> None:
        """Run the cell as a script in several processes: it shares nothing with the notebook but its folder and its environment."""
        options: dict[str, Any] = vars(parse_argstring(self.torchrun, line))
        name = options.pop("output")
        if name is not None and not name.isidentifier():
            raise UsageError(f"{name!r} is no name of a variable: give one such as ranks")
        found = torchrun_cell("\n" + cell, **options)  # the magic's own line is the first that the reader counts
        if name is not None:
            self.shell.user_ns[name] = found
