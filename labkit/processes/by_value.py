"""Send functions that a cell or a script defines to another process, as cloudpickle does.

Newer versions of cloudpickle (3.1.3) send code without the name of its file, so that a traceback in
the other process shows no lines of the code. Both processes run the same Python. So this module
sends code in Python's own format, which has the name.
"""

import io
import marshal
from types import CodeType
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):
    """cloudpickle's pickler, except that code keeps the name of its file."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value: code is stored with the name of its file.

        The pickle module calls this method.
        """
        if isinstance(value, CodeType):
            return marshal.loads, (marshal.dumps(value),)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """Pickle a value. `pickle.loads` reads the result.

    A part that cannot be pickled raises an exception of its own kind, such as TypeError.
    """
    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return file.getvalue()
