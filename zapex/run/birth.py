"""A child's first lines: it is bound to its parent before it imports anything large.

A parent may die while its children start, which takes seconds on a busy machine. Until a child has
asked the kernel to end it with its parent, nothing would end it.
"""

import json
import os
import sys

from zapex.errors import CheckpointError, ConfigError, Diverged
from zapex.machine.child import child_setup


def main(text: str) -> None:
    """Become the role that the order in `text` names, and run it."""
    incarnation = child_setup(json.loads(text)["name"])
    from zapex.run import child

    try:
        child.main(text, incarnation)
    except (ConfigError, CheckpointError, Diverged) as error:
        print(" ".join(str(error).split()), flush=True)
        # A status of sysexits.h; it tells the supervisor that another start would not help.
        sys.exit(os.EX_CONFIG)


if __name__ == "__main__":
    main(sys.argv[1])
