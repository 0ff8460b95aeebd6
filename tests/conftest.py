from __future__ import annotations

from hypothesis import settings

# The first example of a test may compile a kernel, and machines differ: pytest's own timeout bounds a test instead.
settings.register_profile("millpond", deadline=None, print_blob=True)
settings.load_profile("millpond")
