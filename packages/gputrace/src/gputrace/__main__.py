"""Run the commands of `python -m gputrace`."""

import sys

from gputrace.commands import main

sys.exit(main())
