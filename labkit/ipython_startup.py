"""Say what to do when a cell needs the kit before the kernel has imported it.

After a restart, `labkit.check(...)` ends in "name 'labkit' is not defined". IPython runs this file
when it starts, from `etc/ipython/startup` of the environment. The file must not import the kit,
and leaves no name in the notebook.
"""


def _load_hint():
    import sys

    def hint(result):
        """Print a sentence below the error. IPython calls this function after each cell."""
        error = result.error_in_exec
        kind = type(error).__name__
        if kind == "NameError" and getattr(error, "name", None) == "labkit":
            told = (
                "The kernel does not know labkit. Run the set-up cell first: the first code cell "
                "of the lesson, which begins with imports."
            )
        elif kind == "UsageError" and any(f"%%{name}` not found" in str(error) for name in magics):
            told = "Run `import labkit` and `%load_ext labkit` first. The set-up cell does both."
        else:
            return
        print(told, file=sys.stderr)

    magics = ("gpu_memory", "gpu_timeline", "torchrun")
    get_ipython().events.register("post_run_cell", hint)  # noqa: F821 (IPython's own)


_load_hint()
del _load_hint
