"""The table of planted faults fits the code. `tools/planted_faults.py` runs the tests on them."""

from collections import Counter
from pathlib import Path

import pytest

from tools import planted_faults

ROOT = Path(__file__).parents[1]
FAULTS = planted_faults.faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_breaks_a_rule_and_no_syntax(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    compile(fault.planted(text), fault.file, "exec")
    assert all((ROOT / path).exists() for path in fault.tests)


def test_every_room_has_two_faults_or_more_with_names_of_their_own():
    assert min(Counter(fault.room for fault in FAULTS).values()) >= 2
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.mark.parametrize("text", ["a = 1", "a = 2; a = 2"])
def test_a_table_that_is_out_of_date_is_named(text):
    fault = planted_faults.Fault(1, "room", "two is three", "rules.py", "a = 2", "a = 3", ())
    with pytest.raises(ValueError, match="two is three.*times in rules.py, not once"):
        fault.planted(text)


def test_faults_are_chosen_by_number_room_and_part_of_a_name():
    assert [fault.number for fault in planted_faults.chosen(["1", "3"])] == [1, 3]
    assert {fault.room for fault in planted_faults.chosen(["races"])} == {"races"}
    assert [fault.name for fault in planted_faults.chosen([".item()"])] == [".item() does not wait"]
    with pytest.raises(SystemExit, match="'none such'"):
        planted_faults.chosen(["none such"])
