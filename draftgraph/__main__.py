"""`python -m draftgraph`: the command line."""

import sys

from draftgraph.cli import main

sys.exit(main())
