"""``python -m ringlm`` is the command ``ringlm``."""

from ringlm.cli import main

main()
