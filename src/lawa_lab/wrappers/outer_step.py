"""Every so many optimizer steps, one step of the weights themselves.

Lookahead, periodic SWA and outer Nesterov are this step with different settings.
"""

from lawa_lab.wrappers.base import BuiltWrapper, Gradient, Step, WrappedRun

__all__ = ["OuterStep"]


class OuterStep(BuiltWrapper):
    """Every `period` steps the weights move from where they were a period ago towards `end`.

    `end` is where the optimizer has taken them, or with `mean` the mean of the last share `mean` of
    the period's steps. d = anchor - end; v = momentum * v + d; anchor -= rate * (d + momentum * v);
    the weights continue from the anchor. Nothing happens in the first `start` steps. Buffers and
    the optimizer's own momentum are unchanged.
    """

    def __init__(
        self,
        run: WrappedRun,
        *,
        period: int,
        rate: float,
        momentum: float = 0.0,
        mean: float = 0.0,
        start: int = 0,
    ) -> None:
        self._run, self._period, self._rate, self._momentum = run, period, rate, momentum
        self._num_averaged, self._start = round(mean * period), start
        self.num_steps = 0
        self.numbers = ("num_steps",)
        # With rate 1 and no momentum the weights become `end`, wherever they were before.
        self._anchored = rate != 1.0 or momentum > 0.0
        if self._anchored:
            self.anchor = run.weights.clone()
            self.vectors += ("anchor",)
        if momentum:
            self.velocity = run.weights.zeros()
            self.vectors += ("velocity",)
        if self._num_averaged:
            self.mean = run.weights.clone()
            self.vectors += ("mean",)

    def step(self, gradient: Gradient, inner: Step) -> None:
        """One optimizer step, and at the end of a period one of the weights."""
        inner(gradient)
        self.num_steps += 1
        done = self.num_steps - self._start
        if done < 0:
            return
        if done == 0:
            self.restart()
            return
        left = -done % self._period
        number = self._num_averaged - left  # of this step among those that are averaged
        if number == 1:
            self.mean.copy_(self._run.weights)
        elif number > 1:
            self.mean.lerp_(self._run.weights, 1.0 / number)
        if left == 0:
            self._move()

    def restart(self) -> None:
        """The next period starts from the weights as they are."""
        if self._anchored:
            self.anchor.copy_(self._run.weights)
        if self._momentum:
            self.velocity.zero_()
        if self._num_averaged:
            self.mean.copy_(self._run.weights)

    def _move(self) -> None:
        weights = self._run.weights
        end = self.mean if self._num_averaged else weights
        if not self._momentum:
            if self._anchored:
                self.anchor.lerp_(end, self._rate)
        else:
            way = self.anchor.clone()
            way.add_(end, -1.0)
            self.velocity.mul_(self._momentum)
            self.velocity.add_(way)
            way.add_(self.velocity, self._momentum)
            self.anchor.add_(way, -self._rate)
        weights.copy_(self.anchor if self._anchored else end)
