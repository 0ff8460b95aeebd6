"""`python -m millpond.testing.simulation --seeds 1000`."""

import sys

from millpond.testing.simulation.seeds import main

sys.exit(main())
