"""`python -m zapex WORD ...` is the command `zapex`.

`python -m zapex --child TITLE WORD ...` runs it as the child of another process, with which it
ends.
"""

import sys


def _run(words: list[str]) -> int:
    if words[:1] == ["--child"]:  # it is bound to its parent before it imports anything large
        from zapex.machine.child import child_setup

        child_setup(words[1])
        words = words[2:]
    from zapex.cli.main import main

    return main(words)


sys.exit(_run(sys.argv[1:]))
