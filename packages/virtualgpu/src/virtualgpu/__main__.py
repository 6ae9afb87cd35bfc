"""The command `python -m virtualgpu`."""

import sys

from virtualgpu.commands import main

sys.exit(main())
