"""A child's first lines: it belongs to its parent before it imports anything large.

A parent may die while its children start, which takes seconds on a busy machine; until a child has
said that it wants to die with its parent, nothing ends it.
"""

import json
import os
import sys

from zapex.errors import ConfigError
from zapex.supervisor import child_setup


def main(text: str) -> None:
    """Become the role that the order in `text` names, and run it."""
    incarnation = child_setup(json.loads(text)["name"])
    from zapex import child

    try:
        child.main(text, incarnation)
    except ConfigError as error:
        print(error, flush=True)
        # A status of sysexits.h, and the supervisor's sign that another life would mend nothing.
        sys.exit(os.EX_CONFIG)


if __name__ == "__main__":
    main(sys.argv[1])
