"""A child's first lines: it belongs to its parent before it imports anything large.

A parent may die while its children start, which takes seconds on a busy machine; until a child has
said that it wants to die with its parent, nothing ends it.
"""

import json
import sys

from zapex.supervisor import child_setup


def main(text: str) -> None:
    """Become the role that the order in `text` names, and run it."""
    incarnation = child_setup(json.loads(text)["name"])
    from zapex import child

    child.main(text, incarnation)


if __name__ == "__main__":
    main(sys.argv[1])
