"""What a notebook's text says: the kit's formulas are noticed under whatever name; honest habits are not."""

import pytest

from labcourse import scan


@pytest.mark.parametrize(
    "source",
    [
        "from labkit.labs import *\nrank_memory('FSDP', 9, 2)",
        "from virtualgpu import *",
        "from labkit import *\nlabs.rank_memory('FSDP', 9, 2)",
        "def needed(parameters, all_=labkit.labs): return all_.rank_memory('FSDP', parameters, 2)",
        "[labkit.labs][0].rank_memory('FSDP', 9, 2)",
        "(made := labkit.labs).rank_memory('FSDP', 9, 2)",
        "made: object = labkit.labs\nmade.rank_memory('FSDP', 9, 2)",
        "made, _ = labkit.labs, 1\nmade.rank_memory('FSDP', 9, 2)",
        "from math import sqrt as made\nmade = labkit.labs\nmade.rank_memory('FSDP', 9, 2)",
        "made = labkit.labs\nmade.rank_memory('FSDP', 9, 2)",
    ],
)
def test_a_formula_of_the_kit_is_noticed_under_any_name(source):
    assert scan.remarks([source])


@pytest.mark.parametrize(
    "source",
    [
        "from labkit import *\ncheck('00.1', on_gpu)",
        "from math import *\nfrom torch.nn.functional import *",
        "print(labkit.__version__, labkit)\nhelp(labkit.labs)\nlabkit",
        "labs = labkit.labs\nlabs.ShardingLab()",
        "import labkit as kit\nkit.use(gpus=2)\nlabkit.labs.plot_prices(labkit.labs.recorded_result('prices'))",
    ],
)
def test_an_honest_text_has_no_remark(source):
    assert scan.remarks([source]) == []
