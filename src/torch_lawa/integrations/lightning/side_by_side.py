"""Validation and test of both weights: `val_loss` and `val_loss_averaged` in one evaluation.

A module may accumulate values over its validation steps and log them at the end, so each set of
weights needs a complete validation, from the module's first hook to its last. Lightning's own loop
runs it twice: first with the averaged weights, without callbacks and loggers, then with the
trained weights as usual. The first run's values are logged again under their other names before
any callback's hook for the end of the validation. To choose a window, the first run is repeated
for several of them, and the values of the chosen one are logged again.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_lawa.evaluation import ActClock
from torch_lawa.integrations.lightning._compat import (
    DummyLogger,
    EvaluationLoop,
    Logger,
    Trainer,
)
from torch_lawa.integrations.lightning.average import ModuleAverage, ranks_of
from torch_lawa.integrations.lightning.loaders import generator_states
from torch_lawa.integrations.lightning.strategies import trained_model
from torch_lawa.integrations.random_state import preserved_rng

__all__ = ["evaluate_twice"]


@dataclass(frozen=True)
class _Logged:
    """One value of an evaluation, and how its module logged it."""

    name: str
    value: Tensor
    loader: int | None  # the index of its loader, if there are several
    logger: bool
    prog_bar: bool

    def renamed(self, suffix: str) -> "_Logged":
        """`val_loss` -> `val_loss_averaged`, `val_loss/dataloader_idx_0` likewise."""
        name, slash, loader = self.name.partition("/dataloader_idx_")
        return replace(self, name=f"{name}_{suffix}{slash}{loader}")


def evaluate_twice(trainer: Trainer, average: ModuleAverage) -> None:
    """Make the loops for validation and test evaluate the average, too."""
    for loop in (
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
    ):
        if not isinstance(loop, _TwiceLoop):
            loop.__class__ = _TwiceLoop  # the loops exist already, and others hold them
            vars(loop).update(averages=[], logged=None, windows={})
        averages = vars(loop)["averages"]
        if not any(known is average for known in averages):
            averages.append(average)


class _TwiceLoop(EvaluationLoop):
    averages: list[ModuleAverage]
    logged: list[_Logged] | None  # while averaged weights are evaluated, what they logged
    others: list[_Logged]  # what averaged weights logged in this evaluation, renamed
    # To choose from: what each window logged, by the average's name and k; and the seconds. None
    # stands for what the trained weights will log.
    windows: dict[str, tuple[dict[int, list[_Logged] | None], float]]
    outputs: list[dict[str, Tensor]]  # what is returned: one dict per loader
    generators: dict[torch.Generator, Tensor]  # of the loaders, before averaged weights used them

    def run(self) -> list[Any]:
        """Evaluate each average, then the trained weights."""
        self.others = []
        if not self.trainer.sanity_checking:
            for average in self.averages:
                if self._chooses(average):
                    self.windows[average.name] = self._run_windows(average)
                elif average.usable(self.trainer):
                    self.others += [
                        logged.renamed(average.name) for logged in self._run_averaged(average)
                    ]
        outputs: list[Any] = super().run()
        return outputs

    def _chooses(self, average: ModuleAverage) -> bool:
        return average.search is not None and self.trainer.state.fn == "fit"

    def _run_windows(self, average: ModuleAverage) -> tuple[dict[int, list[_Logged] | None], float]:
        assert average.search is not None
        clock = ActClock(self.trainer.lightning_module)
        found: dict[int, list[_Logged] | None] = {}
        with clock("choose"):
            for k in average.search.candidates(average.averager):
                if k == 1 and average.newest_is_trained(self.trainer):
                    found[k] = None
                    continue
                with average.trying(k):
                    found[k] = self._run_averaged(average)
        return found, clock.take()["choose"]

    def _run_averaged(self, average: ModuleAverage) -> list[_Logged]:
        names = ("batch_progress", "_seen_batches_per_dataloader", "verbose", "_restarting")
        before = {name: vars(self)[name] for name in names}
        self.batch_progress = type(self.batch_progress)()
        self._seen_batches_per_dataloader = type(self._seen_batches_per_dataloader)(int)
        self.verbose, self._restarting, self.logged, self.generators = False, False, [], {}
        try:
            average.swap_in(self.trainer)
            with preserved_rng(self.trainer.strategy.root_device), _isolated(self.trainer):
                super().run()
            return self.logged
        finally:
            average.restore()
            self.logged = None
            vars(self).update(before)
            for generator, state in self.generators.items():
                generator.set_state(state)

    def reset(self) -> None:
        """Begin with the first batch; the trained weights will get the same batches."""
        if self.logged is not None and self._combined_loader is not None:
            self.generators = generator_states(self._combined_loader.flattened)
        super().reset()

    def _on_evaluation_epoch_end(self) -> None:
        super()._on_evaluation_epoch_end()
        if self.logged is not None:
            self.logged += _logged(self._results)
            return
        if self.trainer.sanity_checking:
            return
        self.outputs = self._logged_outputs
        for average in self.averages:
            if self.trainer.state.fn == "fit" or average.search is not None:
                self._fill_in(average)
        for logged in self.others:
            self._results.log(
                "on_test_epoch_end" if self.trainer.testing else "on_validation_epoch_end",
                logged.name,
                logged.value,
                prog_bar=logged.prog_bar,
                logger=logged.logger,
                sync_dist=True,  # the module has reduced it already, if it wanted to
                add_dataloader_idx=False,
                batch_size=1,
            )

    def _fill_in(self, average: ModuleAverage) -> None:
        """A monitor must find its metric from the first validation on, and no old value later."""
        trained = _logged(self._results)
        own = [logged.renamed(average.name) for logged in trained]
        if self._chooses(average):
            self.others += self._chosen(average, trained)
        elif not average.usable(self.trainer):
            self.others += own
            return
        averaged = {logged.name for logged in self.others}
        for logged in own:
            if logged.name not in averaged:  # a callback logged it
                vars(self.trainer._logger_connector)["_callback_metrics"].pop(logged.name, None)

    def _chosen(self, average: ModuleAverage, trained: list[_Logged]) -> list[_Logged]:
        """Choose a window, now that the trained weights are validated: its values, renamed."""
        found, seconds = self.windows.pop(average.name)
        windows = {0: trained, **{k: trained if w is None else w for k, w in found.items()}}
        values = {k: {each.name: each.value for each in logged} for k, logged in windows.items()}
        model, ranks = trained_model(self.trainer), ranks_of(self.trainer)
        k = average.choose(values, seconds, model, ranks)
        facts = {"k": float(k), "seconds": seconds}
        device = self.trainer.strategy.root_device  # where ranks can reduce it
        return [logged.renamed(average.name) for logged in windows[k]] + [
            _Logged(f"{average.name}_{name}", torch.tensor(value, device=device), None, True, False)
            for name, value in facts.items()
        ]

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        super()._on_evaluation_end(*args, **kwargs)
        if self.logged is None and not self.trainer.sanity_checking:
            # Lightning returns what is logged at the end for all loaders; ours may be of one.
            for logged in self.others:
                for loader, output in enumerate(self.outputs):
                    if logged.loader not in (None, loader):
                        output.pop(logged.name, None)


def _logged(results: Any) -> list[_Logged]:
    """Every value of the whole evaluation, under each of its names."""
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


class _SilentLogger(DummyLogger):
    """Looks like another logger, with its folders, and records nothing."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "name", "version", "save_dir", "log_dir", "root_dir"):
            return getattr(super().__getattribute__("_logger"), name)
        return super().__getattribute__(name)


@contextlib.contextmanager
def _isolated(trainer: Trainer) -> Iterator[None]:
    """Nothing inside the block reaches callbacks, loggers or what has been logged so far."""
    connector: Any = trainer._logger_connector
    names = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
    flags = ("_first_loop_iter", "_current_fx")
    before = {name: vars(connector)[name] for name in (*names, *flags)}
    last_time = vars(trainer).get("_last_val_time")
    callbacks, loggers = vars(trainer)["callbacks"], trainer.loggers
    vars(trainer)["callbacks"], trainer.loggers = [], [_SilentLogger(logger) for logger in loggers]
    vars(connector).update({name: dict(before[name]) for name in names})
    try:
        yield
    finally:
        vars(trainer)["callbacks"], trainer.loggers = callbacks, loggers
        vars(trainer)["_last_val_time"] = last_time
        vars(connector).update(before)
