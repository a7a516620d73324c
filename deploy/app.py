"""The program of ``make app``: the window, and the programs that it starts with ``sys.executable -c TEXT``."""

import sys

if sys.argv[1:2] == ["-c"]:
    text = sys.argv[2]
    del sys.argv[1:3]
    exec(text)
else:
    from moa_chat.cli import main

    sys.exit(main())
