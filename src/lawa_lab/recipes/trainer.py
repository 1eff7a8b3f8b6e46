"""Model, optimizer and averagers of one run: a step, a snapshot, a checkpoint."""

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lawa_lab.methods.fitting import Fitted, FittingData
from lawa_lab.methods.registry import RingMethod, parse_method
from lawa_lab.methods.schedule_free import ScheduleFreeAverage
from lawa_lab.methods.stopwatch import Stopwatch
from lawa_lab.recipes.config import TrainConfig
from lawa_lab.recipes.evaluation import Evaluation, averages_of
from lawa_lab.recipes.learning_rate import first_landing_step, learning_rate
from lawa_lab.recipes.optimizers import build_optimizer
from lawa_lab.recipes.parallel import ParallelName, Shards, State, choose_parallel
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.runtime import require_deterministic
from lawa_lab.recipes.task import Batch, Task, Worker, mixed_seed
from lawa_lab.recipes.wrapped_optimizer import WrappedOptimizer
from lawa_lab.wrappers.registry import parse_wrappers
from torch_lawa.averager import LatestWeightAverager
from torch_lawa.averager_protocol import Averager
from torch_lawa.batch_norm import recalibrate_batch_norm
from torch_lawa.errors import ConfigError, LawaError, StateError
from torch_lawa.evaluation import evaluating
from torch_lawa.metrics import MetricsWriter, Row
from torch_lawa.schedule import Every, Horizon, Schedule

__all__ = ["Trainer"]

# Separate the random numbers of initialisation, of steps and of what methods learn.
_MODEL, _STEP, _FIT = 1, 2, 3
_AGREE_EVERY = 10  # steps between agreements of the ranks on whether to stop or save


class Trainer:
    """Model, optimizer and averagers of one run, and its progress."""

    def __init__(
        self,
        plan: RunPlan,
        task: Task,
        worker: Worker,
        *,
        compile: bool | None = None,
        parallel: ParallelName = "ddp",
    ) -> None:
        self.plan, self.task, self.worker = plan, task, worker
        self.parallel = choose_parallel(parallel, worker)
        self.config = config = plan.config
        self.num_steps = self.count_steps(config.epochs)
        self._evaluated_at = {self.count_steps(epochs) for epochs in config.evaluate_at}
        self.nu = config.nu or max(task.num_batches, 1)  # `check` refuses 0 batches
        self.schedule: Schedule = Every(self.nu)
        if config.horizon is not None:
            window = max(config.ks) * config.samples
            self.schedule = Horizon(config.horizon, k=window, start=config.warmup_steps)
        self.check(config)
        cuda = worker.device.type == "cuda"
        torch.manual_seed(mixed_seed(plan.seed, _MODEL))
        self.model = task.build_model().to(worker.device)
        self.parallel.prepare(self.model)
        self.optimizer = build_optimizer(config, self.model, fused=cuda)
        # Compiled graphs share the model's tensors, so swapped weights reach them too.
        compiled = cuda and self.parallel.compiles if compile is None else compile
        self.forward: nn.Module = torch.compile(self.model) if compiled else self.model  # type: ignore[assignment]
        self.trained = self.parallel.trained(self.forward)
        self.averager = LatestWeightAverager(
            k=max(config.ks),
            schedule=self.schedule,
            samples=config.samples,
            min_snapshots=None if config.horizon is None else 1,
            store="device" if cuda else "host",
        )
        wrappers = parse_wrappers(config.wrap, config.optimizer)
        self._wrapped = WrappedOptimizer(
            wrappers, self.model, self.optimizer, self.averager, worker
        )
        self.methods: dict[str, Averager] = {
            str(m): m.read(self.averager) if isinstance(m, RingMethod) else m.build(self.model)
            for m in map(parse_method, config.methods)
        }
        if config.schedule_free:
            self.methods[ScheduleFreeAverage.kind] = ScheduleFreeAverage(self.optimizer)
        self._check_validation()
        self._evaluation = Evaluation(
            config, task, self.model, self.forward, self.averager, self.methods
        )
        self._stopwatch = Stopwatch(worker.device)
        self._stopwatch.seconds = dict.fromkeys(self.methods, 0.0)
        self.step = 0
        self.train_seconds = self.collect_seconds = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=worker.device)
        self._num_losses = 0
        self._began: float | None = None

    def count_steps(self, epochs: float) -> int:
        """How many steps that number of epochs has."""
        return max(1, round(epochs * self.task.num_batches))

    @contextlib.contextmanager
    def branched(self, plan: RunPlan) -> Iterator[None]:
        """Continue as another plan in the block, then return to this step of this plan.

        The plans may differ in what follows from here: the landing and the number of epochs.
        """
        if isinstance(self.parallel, Shards):
            raise ConfigError("branches of a sharded run are not supported: train without fsdp.")
        state, own = copy.deepcopy(self.state_dict()), self.plan
        self._follow(plan)
        try:
            yield
        finally:
            self._follow(own)
            self._restore(state)

    def _follow(self, plan: RunPlan) -> None:
        self.plan, self.config = plan, plan.config
        self.num_steps = self.count_steps(plan.config.epochs)

    @property
    def epoch(self) -> float:
        """Epochs trained so far; an int if it is a whole number."""
        epochs, rest = divmod(self.step, self.task.num_batches)
        return epochs if not rest else self.step / self.task.num_batches

    @property
    def evaluation_due(self) -> bool:
        """Whether to evaluate now: after every N-th epoch (or N times nu steps), and at the end."""
        if self.step == self.num_steps or self.step in self._evaluated_at:
            return True
        return self.step % (self.nu * self.config.evaluate_every) == 0

    def batches(self) -> Iterator[Batch]:
        """The remaining batches."""
        while self.step < self.num_steps:
            epoch, first = divmod(self.step, self.task.num_batches)
            left = self.num_steps - self.step
            yield from itertools.islice(self.task.batches(epoch, first), left)

    def train_step(self, batch: Batch) -> None:
        """One optimizer step, with what wraps it."""
        if self._began is None:
            self._began = time.perf_counter()
        self.model.train()
        rate = learning_rate(self.config, self.step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        share = rate / self.config.learning_rate
        loss = self._wrapped.step(lambda: self._gradient(batch), rate_share=share)
        self.step += 1
        if loss is not None:
            self._loss += loss
            self._num_losses += 1
        if self.methods:
            self._step_methods()

    def _gradient(self, batch: Batch) -> Tensor:
        """The gradient at the present weights, accumulated over micro-batches; returns the loss."""
        # For dropout; the task draws its batches from generators of its own.
        torch.manual_seed(mixed_seed(self.plan.seed, _STEP, self.step, self.worker.rank))
        self.optimizer.zero_grad()
        total = torch.zeros_like(self._loss)
        parts = _split(batch, self.config.micro_batch_size)
        for i, part in enumerate(parts):
            synchronization = self.parallel.micro_batch(self.trained, last=i == len(parts) - 1)
            # Around the forward pass too, which selects the kernels of the backward pass.
            with (
                synchronization,
                require_deterministic() if self.task.strict else contextlib.nullcontext(),
            ):
                with self.autocast():
                    loss = self.task.loss(self.trained, part) / len(parts)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        return total

    def collect(self) -> None:
        """Take a snapshot of the weights."""
        self._pause()
        self.parallel.synchronize_buffers(self.model)
        begin = time.perf_counter()
        self.averager.collect(self.model, step=self.step)
        self._wait()
        self.collect_seconds += time.perf_counter() - begin

    def evaluate(self, writer: MetricsWriter | None) -> list[Row]:
        """Rows of raw weights and averages; averages but the first only every `variants_every`."""
        self._pause()
        self.parallel.synchronize_buffers(self.model)
        config = self.config
        number = self.step // (self.nu * config.evaluate_every)
        last = self.step == self.num_steps
        whole = number % config.variants_every == 0 or last or self.step in self._evaluated_at
        self._fit_methods()
        with self.autocast():
            rows = self._evaluation.rows(
                self._labels(),
                every_average=whole,
                at_end=last,
                method_seconds=self._stopwatch.seconds,
            )
        if writer is not None:
            for row in rows:
                writer.write(row)
        return rows

    def _step_methods(self) -> None:
        """Update every method after an optimizer step; the time is charged to the method."""
        for text, averager in self.methods.items():
            with self._stopwatch(text):
                averager.step(self.model)

    def _fit_methods(self) -> None:
        """Let methods that need data have it; the time is charged to the method."""
        fitted = {text: a for text, a in self.methods.items() if isinstance(a, Fitted)}
        if not fitted:
            return
        data = FittingData(
            self.model, self._batches_ahead, self._fitting_loss, self._validate, self._mean_of
        )
        for text, averager in fitted.items():
            torch.manual_seed(mixed_seed(self.plan.seed, _FIT, self.step, self.worker.rank))
            with self._stopwatch(text):
                averager.fit(data)
        self._wait()
        self._stopwatch.settle()  # it is not part of the training time

    def _batches_ahead(self) -> Iterator[Batch]:
        """The training batches after this step, epoch after epoch."""
        epoch, first = divmod(self.step, self.task.num_batches)
        for number in itertools.count(epoch):
            yield from self.task.batches(number, first if number == epoch else 0)

    def _fitting_loss(self, batch: Batch) -> Tensor:
        self.model.train()
        with self.autocast():
            return self.task.loss(self.model, batch)

    def _validate(self) -> float:
        with self.autocast():
            recalibrate_batch_norm(self.model, self.task.calibration())
            with evaluating(self.model):
                values = self.task.evaluate(self.forward)
        return values["valid_loss"]

    def _mean_of(self, values: Sequence[float]) -> list[float]:
        totals = self.worker.total(values, "the mean of a method's values")
        return [total / self.worker.world_size for total in totals]

    def agree(self, *answers: bool) -> list[bool]:
        """Whether any rank answers yes, for each question; exchanged every 10 steps."""
        if self.worker.world_size == 1:
            return list(answers)
        if self.step % _AGREE_EVERY and self.step < self.num_steps:
            return [False] * len(answers)
        totals = self.worker.total(list(map(float, answers)), "the agreement to stop or save")
        return [total > 0 for total in totals]

    def averaged(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The first average, BatchNorm statistics re-estimated, and the metadata of its file."""
        k, rule = averages_of(self.config)[0]
        k = min(k, len(self.averager))  # with a horizon, a short run may have fewer
        with self.averager.swapped_into(self.model, k, coefficients=rule):
            with self.autocast():
                recalibrate_batch_norm(self.model, self.task.calibration())
            whole = self.parallel.whole(self.model)
            tensors = {name: tensor.clone() for name, tensor in whole.items()}
        notes = {"recipe": self.config.recipe, "seed": str(self.plan.seed), "k": str(k)}
        return tensors, {**notes, "step": str(self.step)}

    def progress(self) -> dict[str, Any]:
        """How far the run has come, as plain numbers; called on every rank."""
        self._pause()
        # One loss per rank: their mean would be rounded.
        losses = [0.0] * self.worker.world_size
        losses[self.worker.rank] = self._loss.item()
        losses = self.worker.total(losses, "the losses of all ranks")
        return {
            "step": self.step,
            "losses": losses,
            "num_losses": self._num_losses,
            "train_seconds": self.train_seconds,
            "collect_seconds": self.collect_seconds,
            **({"method_seconds": dict(self._stopwatch.seconds)} if self.methods else {}),
        }

    def _set_progress(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self._num_losses = int(state["num_losses"])
        losses = state["losses"]
        same = len(losses) == self.worker.world_size
        self._loss.fill_(losses[self.worker.rank] if same else sum(losses) / len(losses))
        self.train_seconds = float(state["train_seconds"])
        self.collect_seconds = float(state["collect_seconds"])
        if self.methods:
            self._stopwatch.seconds = dict(state["method_seconds"])

    def state_dict(self) -> State:
        """Everything that the rest of the run depends on."""
        progress = self.progress()
        return self.parallel.state_of(self.model, self.optimizer, self._parts(), progress)

    def save(self, folder: RunFolder) -> None:
        """Write a checkpoint; called on every rank."""
        self.parallel.save(self.state_dict(), folder)

    def load(self, folder: RunFolder) -> bool:
        """Resume from the folder's checkpoint, if there is one; returns whether there was."""
        state = self.parallel.load(folder, self.state_dict)
        if state is None:
            return False
        try:
            self._restore(state)
        except KeyError as error:
            raise StateError(f"the checkpoint does not match this run: {error}") from None
        return True

    def _restore(self, state: State) -> None:
        parts = self._parts()
        self._set_progress(self.parallel.restore(state, self.model, self.optimizer, parts))

    def _parts(self) -> dict[str, Any]:
        """What a checkpoint holds besides the model and the optimizer, by name."""
        search = self._evaluation.search
        chosen = {} if search is None else {"window search": search}
        return {"averager": self.averager, **self.methods, **chosen, **self._wrapped.built}

    def _labels(self) -> Row:
        labels: Row = {
            "recipe": self.config.recipe,
            "run": self.plan.run_name,
            "seed": self.plan.seed,
            "schedule": self.config.schedule,
            "land": self.config.land,
            "budget_epochs": self.config.epochs,
            "epoch": self.epoch,
            "step": self.step,
            "learning_rate": learning_rate(self.config, self.step - 1, self.num_steps),
            "peak_learning_rate": self.config.learning_rate,
            "device": _device_name(self.worker.device),
            "num_devices": self.worker.world_size,
            "train_seconds": self.train_seconds,
            "collect_seconds": self.collect_seconds,
            **self._wrapped.facts,
        }
        if self._num_losses:
            own = self._loss.item() / self._num_losses
            [loss] = self.worker.total([own], "the training loss")
            labels["train_loss"] = loss / self.worker.world_size
            if not math.isfinite(loss):
                raise LawaError(
                    f"the training loss was {loss} between step {self.step - self._num_losses} and "
                    f"{self.step}: the run has diverged. Try a lower learning rate or a warm-up."
                )
            self._loss.zero_()
            self._num_losses = 0
        return labels

    def _pause(self) -> None:
        """Add the time since the last pause to the training time; what follows is not training."""
        if self._began is not None:
            self._wait()
            spent = time.perf_counter() - self._began
            self.train_seconds += spent - self._stopwatch.settle()
            self._began = None

    def _wait(self) -> None:
        if self.worker.device.type == "cuda":
            torch.cuda.synchronize(self.worker.device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bfloat16 on CUDA."""
        if self.worker.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.autocast("cuda", torch.bfloat16)

    def check(self, config: TrainConfig) -> None:
        """Raise if settings, of this run or one of another length, do not suit data and ranks."""
        world_size = self.worker.world_size
        if self.task.num_batches < 1:
            raise ConfigError(
                f"batch_size={config.batch_size}: the training data has fewer examples than that."
            )
        if config.batch_size % world_size:
            raise ConfigError(
                f"batch_size={config.batch_size}: must be a multiple of the {world_size} "
                "processes, so that each gets an equal part."
            )
        self.check_warmup(config)
        num_snapshots = self.schedule.expected(range(1, self.count_steps(config.epochs) + 1))
        if num_snapshots is not None:
            num_snapshots //= config.samples
        if num_snapshots == 0 and config.horizon is not None:
            raise ConfigError(
                f"epochs={config.epochs:g}: the run ends before its warm-up of "
                f"{config.warmup_steps} steps and a first snapshot, so nothing would be averaged. "
                "Train longer, or lower --warmup-steps or --samples."
            )
        short = num_snapshots is not None and num_snapshots < max(config.ks)
        if short and config.horizon is None:  # a growing window is read before it is full
            options = ["--samples"] * (config.samples > 1) + ["--ks or --nu"]
            raise ConfigError(
                f"k={max(config.ks)}: the run takes {num_snapshots} "
                f"snapshot{'s'[: num_snapshots != 1]}, so this window would never be full. Train "
                f"longer, or lower {', '.join(options)}."
            )
        own = config.batch_size // world_size
        if config.micro_batch_size is not None and own % min(own, config.micro_batch_size):
            raise ConfigError(
                f"micro_batch_size={config.micro_batch_size}: does not divide the {own} examples "
                "per step of one process."
            )

    def check_warmup(self, config: TrainConfig) -> None:
        """Raise if the warm-up does not end before the run does, or before its landing begins."""
        steps = first_landing_step(config, self.count_steps(config.epochs))
        if config.warmup_steps > steps:
            raise ConfigError(
                f"warmup_steps={config.warmup_steps}: longer than the {steps} steps"
                f"{' before the landing' if config.land else ''} of a run of {config.epochs:g} "
                f"epoch{'s' * (config.epochs != 1)}. Train longer, or lower --warmup-steps."
            )

    def _check_validation(self) -> None:
        """Refuse what chooses by validation loss if there is none."""
        choosing = [f"--methods {t}" for t, a in self.methods.items() if getattr(a, "validates", 0)]
        choosing += ["--choose-window"] if self.config.choose_window else []
        if choosing and "valid_loss" not in self.task.metrics:
            raise ConfigError(
                f"{choosing[0]} chooses by valid_loss, but this run measures "
                f"{', '.join(self.task.metrics)}, and choosing on test data would flatter the "
                "result. Hold out validation data, where the recipe has --validation-fraction or "
                "--held-out, and add --evaluate-test."
            )


def _split(batch: Batch, size: int | None) -> list[Batch]:
    if size is None or size >= len(batch[0]):
        return [batch]
    return list(zip(*(torch.split(tensor, size) for tensor in batch), strict=True))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
