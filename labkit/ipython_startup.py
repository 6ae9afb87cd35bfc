"""Say what to do when a cell needs the kit before the kernel has imported it.

After a restart, `labkit.check(...)` ends in "name 'labkit' is not defined", and other cells in the
same error about `torch`. IPython runs this file when it starts, from `etc/ipython/startup` of the
environment. The file must not import the kit, and leaves no name in the notebook.
"""


def _load_hint():
    import sys

    def hint(result):
        """Print a sentence below an error of a cell that needs the kit before it was imported.

        IPython calls this function after each cell, with its result.
        """
        error = result.error_in_exec
        kind = type(error).__name__
        name = getattr(error, "name", None)
        if kind == "NameError" and name in imported and "labkit" not in shell.user_ns:
            told = (
                f"The kernel does not know {name}.\n"
                "In a lesson, first run the set-up cell: the first code cell, with the imports."
            )
        elif kind == "UsageError" and any(f"%%{name}` not found" in str(error) for name in magics):
            told = "Run `import labkit` and `%load_ext labkit` in another cell first."
        else:
            return
        print(told, file=sys.stderr)

    magics = ("gpu_memory", "gpu_timeline", "torchrun")
    imported = ("labkit", "torch", "nn", "dist")  # by most set-up cells
    shell = get_ipython()  # noqa: F821 (IPython's own)
    shell.events.register("post_run_cell", hint)


_load_hint()
del _load_hint
