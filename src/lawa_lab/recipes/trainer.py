"""Model, optimizer and averager of one run: a step, a snapshot, an evaluation, a checkpoint."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lawa_lab.recipes.configs import TrainConfig
from lawa_lab.recipes.machine import strictly
from lawa_lab.recipes.optimizers import build_optimizer, learning_rate
from lawa_lab.recipes.parallel import Parallel, choose_parallel
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.task import Batch, Place, Task, mixed_seed
from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm import recalibrate_batch_norm
from torch_lawa.coefficients import Coefficients, parse_coefficients
from torch_lawa.errors import ConfigError, LawaError, StateError
from torch_lawa.evaluation import evaluate_side_by_side
from torch_lawa.metrics import MetricsWriter, Row
from torch_lawa.schedule import Every

__all__ = ["Trainer"]

_MODEL, _STEP = 1, 2  # what a seed is for
_AGREE_EVERY = 10  # steps after which several processes ask each other whether to stop


class Trainer:
    """Model, optimizer and averager of one run, and how far they are."""

    def __init__(
        self,
        plan: RunPlan,
        task: Task,
        place: Place,
        *,
        compile: bool | None = None,
        parallel: Parallel = "ddp",
    ) -> None:
        self.plan, self.task, self.place = plan, task, place
        self.parallel = choose_parallel(parallel, place)
        self.config = config = plan.config
        self.num_steps = config.epochs * task.num_batches
        self.schedule = Every(config.nu or max(task.num_batches, 1))  # `_check` refuses 0 batches
        self._check()
        cuda = place.device.type == "cuda"
        torch.manual_seed(mixed_seed(plan.seed, _MODEL))
        self.model = task.build_model().to(place.device)
        self.parallel.prepare(self.model)
        self.optimizer = build_optimizer(config, self.model, fused=cuda)
        # Compiled graphs share the model's own tensors, so a swap reaches them, too.
        compiled = cuda and self.parallel.compiles if compile is None else compile
        self.forward: nn.Module = torch.compile(self.model) if compiled else self.model  # type: ignore[assignment]
        self.trained = self.parallel.trained(self.forward)
        self.averager = LatestWeightAverager(
            k=max(config.ks), schedule=self.schedule, store="device" if cuda else "host"
        )
        self.step = 0
        self.train_seconds = self.collect_seconds = 0.0
        self._loss = torch.zeros((), dtype=torch.float64, device=place.device)
        self._num_losses = 0
        self._began: float | None = None

    @property
    def epoch(self) -> float:
        """Epochs that were made, a whole number where it is one."""
        epochs, rest = divmod(self.step, self.task.num_batches)
        return epochs if not rest else self.step / self.task.num_batches

    @property
    def evaluation_due(self) -> bool:
        """After every `evaluate_every` snapshots, and at the end."""
        collected = self.averager.snapshot_steps[-1:] == [self.step]
        every = self.config.evaluate_every
        due = collected and self.averager.num_collected % every == 0
        return due or self.step == self.num_steps

    def batches(self) -> Iterator[Batch]:
        """The batches that are left."""
        while self.step < self.num_steps:
            epoch, first = divmod(self.step, self.task.num_batches)
            yield from self.task.batches(epoch, first)

    def train_step(self, batch: Batch) -> None:
        """Gradients of one batch, micro-batch by micro-batch, and a step of the optimizer."""
        if self._began is None:
            self._began = time.perf_counter()
        # For dropout; what a batch looks like was drawn by the task.
        torch.manual_seed(mixed_seed(self.plan.seed, _STEP, self.step, self.place.rank))
        self.model.train()
        rate = learning_rate(self.config, self.step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        parts = _split(batch, self.config.micro_batch_size)
        for i, part in enumerate(parts):
            exchange = self.parallel.step_part(self.trained, last=i == len(parts) - 1)
            # The way forward chooses the algorithm of the way back.
            with exchange, strictly() if self.task.strict else contextlib.nullcontext():
                with self.autocast():
                    loss = self.task.loss(self.trained, part) / len(parts)
                loss.backward()  # type: ignore[no-untyped-call]
            self._loss += loss.detach()
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.step += 1
        self._num_losses += 1

    def collect(self) -> None:
        """A snapshot of the weights."""
        self._pause()
        self.parallel.settle(self.model)
        begin = time.perf_counter()
        self.averager.collect(self.model, step=self.step)
        self._wait()
        self.collect_seconds += time.perf_counter() - begin

    def evaluate(self, writer: MetricsWriter | None) -> list[Row]:
        """Rows of raw and averaged weights; the first average every time, others now and then."""
        self._pause()
        self.parallel.settle(self.model)
        config = self.config
        number = self.averager.num_collected // config.evaluate_every
        last = self.step == self.num_steps
        whole = number % config.variants_every == 0 or last
        with self.autocast():
            return evaluate_side_by_side(
                self.model,
                self.averager,
                lambda _: self.task.evaluate(self.forward),
                metrics=writer,
                labels=self._labels(),
                ks=_averages(config)[: None if whole else 1],
                batch_norm=config.batch_norm[: None if whole else 1],  # type: ignore[arg-type]
                loader=self.task.calibration(),
            )

    def agree(self, *answers: bool) -> list[bool]:
        """Whether any process says yes, question by question; asked now and then only."""
        if self.place.world_size == 1:
            return list(answers)
        if self.step % _AGREE_EVERY and self.step < self.num_steps:
            return [False] * len(answers)
        return [total > 0 for total in self.place.total([float(answer) for answer in answers])]

    def averaged(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The first average, whole, BatchNorm statistics re-estimated; and what it is."""
        k, rule = _averages(self.config)[0]
        with self.averager.swapped_into(self.model, k, coefficients=rule):
            with self.autocast():
                recalibrate_batch_norm(self.model, self.task.calibration())
            whole = self.parallel.whole(self.model)
            tensors = {name: tensor.clone() for name, tensor in whole.items()}
        notes = {"recipe": self.config.recipe, "seed": str(self.plan.seed), "k": str(k)}
        return tensors, {**notes, "step": str(self.step)}

    @property
    def progress(self) -> dict[str, Any]:
        """How far the run is: plain numbers."""
        self._pause()
        # Those of each process by themselves: their mean would be rounded.
        own, ranks = self._loss.item(), range(self.place.world_size)
        losses = self.place.total([own if rank == self.place.rank else 0.0 for rank in ranks])
        return {
            "step": self.step,
            "losses": losses,
            "num_losses": self._num_losses,
            "train_seconds": self.train_seconds,
            "collect_seconds": self.collect_seconds,
        }

    @progress.setter
    def progress(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self._num_losses = int(state["num_losses"])
        losses = state["losses"]
        same = len(losses) == self.place.world_size
        self._loss.fill_(losses[self.place.rank] if same else sum(losses) / len(losses))
        self.train_seconds = float(state["train_seconds"])
        self.collect_seconds = float(state["collect_seconds"])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            **self.progress,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averager": self.averager.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        try:
            self.progress = state
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.averager.load_state_dict(state["averager"])
        except (KeyError, RuntimeError) as error:
            raise StateError(f"the checkpoint does not fit this run: {error}") from None

    def _labels(self) -> Row:
        labels: Row = {
            "recipe": self.config.recipe,
            "run": self.config.run_name,
            "seed": self.plan.seed,
            "epoch": self.epoch,
            "step": self.step,
            "learning_rate": learning_rate(self.config, self.step - 1, self.num_steps),
            "device": _device_name(self.place.device),
            "num_devices": self.place.world_size,
            "train_seconds": self.train_seconds,
            "collect_seconds": self.collect_seconds,
        }
        if self._num_losses:
            total = [self._loss.item() / self._num_losses]
            [loss] = self.place.total(total)
            labels["train_loss"] = loss / self.place.world_size
            if not math.isfinite(loss):
                raise LawaError(
                    f"the training loss was {loss} between step {self.step - self._num_losses} and "
                    f"{self.step}: the run has diverged. Try a lower learning rate or a warm-up."
                )
            self._loss.zero_()
            self._num_losses = 0
        return labels

    def _pause(self) -> None:
        """Book the seconds of training so far; what follows is not training."""
        if self._began is not None:
            self._wait()
            self.train_seconds += time.perf_counter() - self._began
            self._began = None

    def _wait(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bfloat16 where it is fast."""
        if self.place.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.autocast("cuda", torch.bfloat16)

    def _check(self) -> None:
        config, world_size = self.config, self.place.world_size
        if self.task.num_batches < 1:
            raise ConfigError(
                f"batch_size={config.batch_size}: the training data has fewer examples than that."
            )
        if config.batch_size % world_size:
            raise ConfigError(
                f"batch_size={config.batch_size}: {world_size} processes cannot share it evenly."
            )
        num_snapshots = self.schedule.expected(range(1, self.num_steps + 1))
        if num_snapshots is not None and num_snapshots < max(config.ks):
            raise ConfigError(
                f"k={max(config.ks)}: the run takes {num_snapshots} snapshots, so this window "
                "would never be full. Train longer, or lower ks or nu."
            )
        own = config.batch_size // world_size
        if config.micro_batch_size is not None and own % min(own, config.micro_batch_size):
            raise ConfigError(
                f"micro_batch_size={config.micro_batch_size}: does not divide the {own} examples "
                "of a step in one process."
            )


def _averages(config: TrainConfig) -> list[tuple[int, Coefficients]]:
    """Every k with the first coefficients, then the first k with the others."""
    rules = [parse_coefficients(text) for text in config.coefficients]
    return [(k, rules[0]) for k in config.ks] + [(config.ks[0], rule) for rule in rules[1:]]


def _split(batch: Batch, size: int | None) -> list[Batch]:
    if size is None or size >= len(batch[0]):
        return [batch]
    return list(zip(*(torch.split(tensor, size) for tensor in batch), strict=True))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
