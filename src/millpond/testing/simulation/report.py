"""What became of one seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LINES = 30


@dataclass(frozen=True)
class Report:
    """`failure` is empty if every promise was kept; else it tells which was not, and what went before."""

    seed: int
    failure: str
    fired: Counter[str]
    did: Counter[str] = field(default_factory=Counter)
    digest: str = ""
    steps: int = 0
    seconds: float = 0.0
    """Of virtual time."""

    @property
    def passed(self) -> bool:
        return not self.failure

    def __str__(self) -> str:
        if self.passed:
            return f"seed {self.seed}: passed after {self.seconds:.0f} s and {self.steps} steps"
        return (
            f"seed {self.seed}: {self.failure}\n"
            f"faults: {', '.join(f'{kind} {count}' for kind, count in sorted(self.fired.items())) or 'none'}\n"
            f"to repeat it: python -m millpond.testing.simulation --start {self.seed} --seeds 1"
        )
