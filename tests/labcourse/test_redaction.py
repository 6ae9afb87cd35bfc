"""Submissions see what observes answers, and nothing of what judges them."""

import ast
import gc
import time
from concurrent.futures import ThreadPoolExecutor

from labcourse import redaction
from labkit import checks


def bodies(text: str) -> dict[str, str]:
    """What each function of a module does, by its name."""
    return {node.name: ast.unparse(node.body) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_no_judge_and_no_draw_is_left_and_every_observe_is():
    sources = redaction.sources()
    assert "controls.py" not in sources and "lesson_01.py" in sources
    for check in checks.exercises().values():
        found = bodies(sources[f"lesson_{check.number[:2]}.py"])
        for function, kept in ((check.judge, False), (check.draw, False), (check.observe, True)):
            name = redaction.plain(function).__name__
            if name in found:
                assert (redaction.LEFT_OUT not in found[name]) == kept, (check.number, name)


def test_a_function_to_mend_stays_as_it_is_handed_out():
    """With its docstring, without which who never touched it would be told that it is wrong."""
    for check in checks.exercises().values():
        if check.script is not None:
            lesson = f"lesson_{check.number[:2]}.py"
            stub = check.script.__name__
            before = bodies((redaction.FOLDER / lesson).read_text())
            assert bodies(redaction.sources()[lesson]).get(stub) == before.get(stub), check.number


def test_what_computes_the_expected_goes_too():
    found = bodies(redaction.sources()["lesson_01.py"])
    assert found["expected_bytes"] == redaction.LEFT_OUT == found["_difference"]
    assert redaction.LEFT_OUT not in found["_build"]
    imported = [node for node in ast.walk(ast.parse(redaction.sources()["lesson_04.py"])) if isinstance(node, ast.ImportFrom)]
    assert "order" not in {item.name for node in imported for item in node.names}  # the schedule that 04.5 asks for


def test_other_files_stay_as_they_are():
    sources = redaction.sources()
    assert sources["leaky_scripts.py"] == (redaction.FOLDER / "leaky_scripts.py").read_text()


def test_graders_in_several_threads_may_ask_at_once():
    """Garbage is collected while a thread parses, and whatever Python code that runs lets the other thread parse too."""
    redaction._sources.cache_clear()
    known = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.submit(redaction.sources), pool.submit(redaction.sources)
            assert first.result() == second.result()
    finally:
        gc.set_threshold(*known)
        gc.callbacks.remove(give_way)


def give_way(phase: str, info: dict[str, int]) -> None:
    time.sleep(0)
