"""Say how a process ended, and check that faulthandler has written its stack."""

import signal

# The names of fatal signals in words. Other signals are named as they are.
_CRASHES = {
    "SIGSEGV": "a segmentation fault",
    "SIGBUS": "a bus error",
    "SIGFPE": "an arithmetic error",
    "SIGILL": "an illegal instruction",
    "SIGABRT": "an abort",
}


def without_report(name: str, status: int) -> tuple[str, str]:
    """Return the kind and the message for a process that ended without a report.

    Args:
        name: what the message calls the process.
        status: its exit status. A negative status is the number of the signal that ended it.
    """
    if status >= 0:
        return "exit", f"{name} ended with exit status {status} without returning."
    try:
        number = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        return "signal", f"{name} was killed from outside, by signal {-status}."
    if number in _CRASHES:
        return "crash", f"{name} crashed with {_CRASHES[number]} ({number})."
    perhaps = ""
    if number == "SIGKILL":
        perhaps = (
            ", perhaps by the system's out-of-memory killer because this computer's memory ran out"
        )
    return "signal", f"{name} was killed from outside ({number}){perhaps}."


def is_whole_stack(text: str) -> bool:
    """Return whether a text is the whole stack that faulthandler writes.

    The main thread comes last. Its stack ends with its module, or with dots if faulthandler stops.
    """
    return text.endswith((" in <module>\n", "  ...\n"))
