"""A folder for the path of the Python programs that a script under `run` starts."""
