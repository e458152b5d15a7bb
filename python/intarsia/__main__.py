"""python -m intarsia: the same as the command `intarsia`."""

import sys

from .cli import main

sys.exit(main())
