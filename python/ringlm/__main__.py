"""``python -m ringlm`` is the command ``ringlm``."""

import sys

from ringlm.cli import main

sys.exit(main())
