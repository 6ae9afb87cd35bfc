"""A folder on the path of the Python programs that a script started with `run` starts."""
