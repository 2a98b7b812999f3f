"""``python -m ckptool``."""

from .cli.main import main

main()
