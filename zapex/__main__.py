"""`python -m zapex` is the command `zapex`."""

import sys

from zapex.cli.main import main

sys.exit(main())
