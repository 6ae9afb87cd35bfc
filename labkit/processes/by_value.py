"""Functions that a cell or a script defines, sent to another process by value, as cloudpickle does.

Newer versions of cloudpickle (3.1.3) send code without the name of its file, so that a traceback there could not show a line of it.
Sender and receiver run the same Python, so code goes as Python itself stores it, with the name.
"""

import io
import marshal
from types import CodeType
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, except that code keeps the name of its file."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return marshal.loads, (marshal.dumps(value),)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """`value` pickled; `pickle.loads` reads it. Raises what a part of it that cannot be pickled raises."""
    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return file.getvalue()
