"""When a snapshot is due if the window spans a share of the run."""

from dataclasses import dataclass, field

from torch_lawa.schedule import Schedule

__all__ = ["Horizon"]


@dataclass
class Horizon(Schedule):
    """A snapshot whenever the step has grown by a factor, so that k of them span the share."""

    share: float
    k: int
    start: int = 0
    last: int = field(default=0, init=False)

    def due(self, step: int, loss: float | None = None) -> bool:
        ratio = (1.0 - self.share) ** (-1.0 / self.k)
        if step <= self.start or step < ratio * self.last:
            return False
        self.last = step
        return True
