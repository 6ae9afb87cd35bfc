"""What a notebook's text says: what no exercise needs is noticed; honest habits are not."""

import pytest

from labcourse import scan


@pytest.mark.parametrize(
    "source",
    [
        "from labkit.labs import *\nrank_memory('FSDP', 9, 2)",
        "from virtualgpu import *",
        "from labkit import *\nlabs.rank_memory('FSDP', 9, 2)",
        "made = labkit.labs\nmade.rank_memory('FSDP', 9, 2)",
        "held = torch.ones(2, device='cuda').__dict__['_g' + 'pu']",
        "T = type(torch)\nsuper(T, torch).cuda",
        "import operator\nvars(operator)['attr' + 'getter']",
    ],
)
def test_what_no_exercise_needs_is_noticed(source):
    assert scan.remarks([source])


@pytest.mark.parametrize(
    "source",
    [
        "from labkit import *\ncheck('00.1', on_gpu)",
        "from math import *\nfrom torch.nn.functional import *",
        "print(labkit.__version__, labkit)\nhelp(labkit.labs)\nlabkit",
        "labs = labkit.labs\nlabs.ShardingLab()",
        "for kit in [labkit, labkit.labs]: print(kit.__name__, kit.__doc__)",
        "import sys\nON_COLAB = 'google.colab' in sys.modules\nfrom importlib.metadata import version",
        "print(model.__dict__, vars(model))\nmodel.__dict__.keys()\nsuper(Net, self).__init__()\nclass Net(nn.Module): pass",
        "import labkit as kit\nkit.use(gpus=2)\nlabkit.labs.plot_prices(labkit.labs.recorded_result('prices'))",
    ],
)
def test_an_honest_text_has_no_remark(source):
    assert scan.remarks([source]) == []
