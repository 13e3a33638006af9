"""A command as the child of another process: it ends with its parent.

python -m zapex.cli.as_child TITLE DIRECTORY WORD ...
"""

import os
import sys

from zapex.machine.child import child_setup


def main(title: str, directory: str, *words: str) -> int:
    """Belong to the parent, then run `zapex WORDS` in `directory`. Returns its exit code."""
    child_setup(title)
    os.chdir(directory)
    from zapex.cli.main import main as command

    return command(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
