"""`python -m zapex WORD ...` is the command `zapex`.

`python -m zapex --child TITLE WORD ...` runs it as the child of another process, with which it
ends.
"""

import sys

from zapex.cli.main import main
from zapex.machine.child import child_setup

words = sys.argv[1:]
if words[:1] == ["--child"]:
    child_setup(words[1])
    words = words[2:]
sys.exit(main(words))
