"""`python -m rljob_operator`."""

import sys

from .main import main

sys.exit(main())
