"""Validation and test with the averaged weights first, then as ever: `val_loss_averaged` too.

A module may gather things over its validation steps and log them at the end, so both weights need
a validation of their own from the first hook of the module to the last. Lightning's own loop runs
it: once with averaged weights, and callbacks and loggers kept out; then with the trained weights,
and what was logged before is logged again under its other name, before any callback is told that
the validation has ended.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_lawa.integrations.lightning.batch_norm import generator_states
from torch_lawa.integrations.lightning.checkpoints import Averaging
from torch_lawa.integrations.lightning.names import (
    DummyLogger,
    EvaluationLoop,
    Logger,
    Trainer,
    isolate_rng,
)

__all__ = ["evaluate_twice"]


@dataclass(frozen=True)
class _Logged:
    """One value of an evaluation, and where its module wanted to see it."""

    name: str
    value: Tensor
    loader: int | None  # of several, the one it was logged for
    logger: bool
    prog_bar: bool

    def renamed(self, suffix: str) -> "_Logged":
        """`val_loss` -> `val_loss_averaged`, `val_loss/dataloader_idx_0` likewise."""
        name, slash, loader = self.name.partition("/dataloader_idx_")
        return replace(self, name=f"{name}_{suffix}{slash}{loader}")


def evaluate_twice(trainer: Trainer, callback: Averaging) -> None:
    """Make the loops for validation and test evaluate the callback's average, too."""
    for loop in (
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
    ):
        if not isinstance(loop, _TwiceLoop):
            loop.__class__ = _TwiceLoop  # the loops are made, and known to others, already
            vars(loop).update(averagings=[], averaged=None)
        callbacks = vars(loop)["averagings"]
        if not any(known is callback for known in callbacks):
            callbacks.append(callback)


class _TwiceLoop(EvaluationLoop):
    averagings: list[Averaging]
    averaged: list[_Logged] | None  # while averaged weights are evaluated, what they logged
    others: list[_Logged]
    outputs: list[dict[str, Tensor]]  # what is returned, a dict for each loader
    generators: dict[torch.Generator, Tensor]  # of the loaders, before averaged weights used them

    def run(self) -> list[Any]:
        """Evaluate each average, then the trained weights."""
        self.others = []
        if not self.trainer.sanity_checking:
            for callback in self.averagings:
                if callback.serves(self.trainer):
                    self.others += [
                        logged.renamed(callback.name) for logged in self._run_averaged(callback)
                    ]
        outputs: list[Any] = super().run()
        return outputs

    def _run_averaged(self, callback: Averaging) -> list[_Logged]:
        names = ("batch_progress", "_seen_batches_per_dataloader", "verbose", "_restarting")
        before = {name: vars(self)[name] for name in names}
        self.batch_progress = type(self.batch_progress)()
        self._seen_batches_per_dataloader = type(self._seen_batches_per_dataloader)(int)
        self.verbose, self._restarting, self.averaged, self.generators = False, False, [], {}
        try:
            callback.lend(self.trainer)
            with isolate_rng(), _on_its_own(self.trainer):
                super().run()
            return self.averaged
        finally:
            callback.take_back()
            self.averaged = None
            vars(self).update(before)
            for generator, state in self.generators.items():
                generator.set_state(state)

    def reset(self) -> None:
        """Begin with the first batch; the trained weights will be given the same ones."""
        if self.averaged is not None and self._combined_loader is not None:
            self.generators = generator_states(self._combined_loader.flattened)
        super().reset()

    def _on_evaluation_epoch_end(self) -> None:
        super()._on_evaluation_epoch_end()
        if self.averaged is not None:
            self.averaged += _logged(self._results)
            return
        if self.trainer.sanity_checking:
            return
        self.outputs = self._logged_outputs
        if self.trainer.state.fn == "fit":
            for callback in self.averagings:
                self._stand_in(callback)
        for logged in self.others:
            self._results.log(
                "on_test_epoch_end" if self.trainer.testing else "on_validation_epoch_end",
                logged.name,
                logged.value,
                prog_bar=logged.prog_bar,
                logger=logged.logger,
                sync_dist=True,  # as far as the module wanted it, it is
                add_dataloader_idx=False,
                batch_size=1,
            )

    def _stand_in(self, callback: Averaging) -> None:
        """What monitors a metric must find it from the first validation on, and then no old one."""
        own = [logged.renamed(callback.name) for logged in _logged(self._results)]
        if not callback.serves(self.trainer):
            self.others += own
            return
        averaged = {logged.name for logged in self.others}
        for logged in own:
            if logged.name not in averaged:  # a callback logged it
                vars(self.trainer._logger_connector)["_callback_metrics"].pop(logged.name, None)

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        super()._on_evaluation_end(*args, **kwargs)
        if self.averaged is None and not self.trainer.sanity_checking:
            # What is logged at the end counts for all loaders. Ours need not.
            for logged in self.others:
                for loader, output in enumerate(self.outputs):
                    if logged.loader not in (None, loader):
                        output.pop(logged.name, None)


def _logged(results: Any) -> list[_Logged]:
    """Every value that stands for the whole evaluation, under each of its names."""
    found = []
    for metric in results.values():
        if metric.has_reset or not metric.meta.on_epoch:
            continue
        value = results._get_cache(metric, on_step=False)
        if isinstance(value, Tensor):
            meta = metric.meta
            name, forked = results._forked_name(metric, on_step=False)
            for each in dict.fromkeys((name, forked)):
                shown = each == forked
                found.append(
                    _Logged(
                        each,
                        value,
                        loader=meta.dataloader_idx,
                        logger=meta.logger and shown,
                        prog_bar=meta.prog_bar and shown,
                    )
                )
    return found


class _Deaf(DummyLogger):
    """Passes for another logger, with its folders, and keeps nothing."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "name", "version", "save_dir", "log_dir", "root_dir"):
            return getattr(super().__getattribute__("_logger"), name)
        return super().__getattribute__(name)


@contextlib.contextmanager
def _on_its_own(trainer: Trainer) -> Iterator[None]:
    """Callbacks, loggers and what has been logged so far do not notice what happens inside."""
    connector: Any = trainer._logger_connector
    names = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
    flags = ("_first_loop_iter", "_current_fx")
    before = {name: vars(connector)[name] for name in (*names, *flags)}
    last_time = vars(trainer).get("_last_val_time")
    callbacks, loggers = vars(trainer)["callbacks"], trainer.loggers
    vars(trainer)["callbacks"], trainer.loggers = [], [_Deaf(logger) for logger in loggers]
    vars(connector).update({name: dict(before[name]) for name in names})
    try:
        yield
    finally:
        vars(trainer)["callbacks"], trainer.loggers = callbacks, loggers
        vars(trainer)["_last_val_time"] = last_time
        vars(connector).update(before)
