"""What a check says about an answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether an answer passed, a message that helps, and the points it earns (an exercise is worth one).

    A notebook shows it as its message.
    """

    passed: bool
    message: str
    points: float = 0.0
    exercise: str = ""

    def __repr__(self) -> str:
        return f"{self.exercise} {self.message}".strip()


def right(note: str = "") -> Verdict:
    return Verdict(True, f"Right. {note}".strip(), points=1.0)


def not_yet(message: str) -> Verdict:
    return Verdict(False, f"Not yet: {message}")


def not_attempted() -> Verdict:
    return Verdict(False, "not attempted")
