"""docs/guides: the code of averager, offline, coming-from and both choices does what they say."""

import argparse
import importlib.util
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.guides import GUIDES, ROOT, blocks, commands
from support.models import same_bits
from support.timm import import_timm
from support.torchtitan import load, unpack_recorded, weights_of
from support.transformers import tiny_model
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from torch_lawa import Every, Horizon, LatestWeightAverager, Recent, recalibrate_batch_norm
from torch_lawa.cli import main


class Bench:
    """What the blocks take for granted: a model, its training, and a record of its weights."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"torch": torch, "epochs": 7, "swa_start": 3, "epoch": 4}
        self.names |= {"train_loader": [torch.randn(8, 2) for _ in range(2200)], "k": 6}
        self.names |= {"train_step": self.step, "evaluate": self.evaluate}
        self.names |= {"train_one_epoch": self.epoch}
        self.names |= {"recalibrate_batch_norm": recalibrate_batch_norm}

    def restart(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.names |= {"model": self.model, "optimizer": self.optimizer}
        self.history: list[Tensor] = []
        self.evaluated: list[Tensor] = []

    def step(self, model: nn.Module, batch: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        (model(batch) - 1).square().mean().backward()
        self.optimizer.step()
        self.history.append(model[0].weight.detach().clone())

    def epoch(self, model: nn.Module, optimizer: object, loader: list[Tensor]) -> None:
        for batch in loader[:5]:
            self.step(model, batch)

    def evaluate(self, model: nn.Module) -> float:
        self.evaluated.append(next(model.parameters()).detach().clone())
        return 0.0

    def run(self, code: str) -> None:
        """One block, on the model as it was before training."""
        self.restart()
        exec(compile(code, "guide", "exec"), self.names)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench()


def mean(snapshots: list[Tensor]) -> Tensor:
    return (sum(snapshot.double() for snapshot in snapshots) / len(snapshots)).float()


def spaced(history: list[Tensor], k: int, nu: int, start: int = 0) -> list[Tensor]:
    return history[start + nu - 1 :: nu][-k:]


def test_torch_ema(bench: Bench) -> None:
    theirs, ours = blocks("coming-from.md", "torch.optim.swa_utils: EMA", "python")
    bench.run(theirs)
    ema = bench.history[0].double()
    for weight in bench.history[1:]:
        ema = 0.99 * ema + 0.01 * weight.double()
    torch.testing.assert_close(bench.evaluated, [ema.float()])
    bench.run(ours)
    assert same_bits(bench.evaluated[0], mean(spaced(bench.history, 10, 20)))
    assert same_bits(bench.model[0].weight.detach(), bench.history[-1])


def test_torch_swa(bench: Bench) -> None:
    theirs, ours, saved = blocks("coming-from.md", "torch.optim.swa_utils: SWA", "python")
    bench.run(theirs)
    bench.run(ours)
    swa, averaged = bench.names["swa_model"], bench.names["averaged_model"]
    assert averaged.n_averaged.item() == swa.n_averaged.item() == 4
    torch.testing.assert_close(averaged.state_dict(), swa.state_dict())
    assert same_bits(averaged.module[0].weight.detach(), mean(bench.history[19::5]))
    bench.run(saved)
    assert same_bits(
        bench.names["averager"].average(k=1)["0.weight"], swa.module[0].weight.detach()
    )


def test_timm(bench: Bench) -> None:
    theirs, ours = blocks("coming-from.md", "timm", "python")
    if import_timm() is not None:
        bench.run(theirs)
        assert set(torch.load("last.pth.tar")["state_dict_ema"]) == set(bench.model.state_dict())
    bench.run(ours)
    checkpoint = torch.load("last.pth.tar", weights_only=True)
    assert checkpoint["epoch"] == 4
    averaged = mean(spaced(bench.history, 10, 20))
    assert same_bits(checkpoint["state_dict_ema"]["0.weight"], averaged)
    assert same_bits(checkpoint["state_dict"]["0.weight"], bench.history[-1])
    assert checkpoint["state_dict_ema"]["1.num_batches_tracked"] == 2200


@pytest.mark.parametrize(
    ("section", "library", "nu", "start"),
    [("ema-pytorch", "ema_pytorch", 200, 100), ("torch-ema", "torch_ema", 20, 0)],
)
def test_libraries_of_emas(bench: Bench, section: str, library: str, nu: int, start: int) -> None:
    theirs, ours = blocks("coming-from.md", section, "python")
    if importlib.util.find_spec(library) is not None:
        bench.run(theirs)
        assert len(bench.evaluated) == 1
    bench.run(ours)
    assert same_bits(bench.evaluated[0], mean(spaced(bench.history, 10, nu, start)))


def test_choosing(bench: Bench) -> None:
    title = "Choosing the schedule, the window and the rate"
    setting, recent = blocks("choosing.md", title, "python")
    bench.run(setting)
    averager, steps = bench.names["averager"], len(bench.history)
    schedule = Horizon(1 / 4, k=256)
    sampled = [step for step in range(1, steps + 1) if schedule.due(step)]
    blocks_of = [sampled[i : i + 16] for i in range(0, len(sampled), 16)]
    whole = [block for block in blocks_of if len(block) == 16]
    assert averager.snapshot_steps == [block[-1] for block in whole[-16:]]
    oldest = whole[-averager.num_averaged]
    taken = [bench.history[step - 1] for step in sampled if step >= oldest[0]]
    torch.testing.assert_close(bench.evaluated[0], mean(taken), rtol=1e-5, atol=1e-6)
    assert averager.snapshot_steps[0] == pytest.approx(0.75 * steps, rel=0.02)
    bench.run(recent)
    assert bench.names["averager"].coefficients == Recent(0.1)


def test_averages_of_the_first_steps_are_as_the_guide_says() -> None:
    assert "no average before step 16" in (text := (GUIDES / "choosing.md").read_text())
    assert "Up to step 31" in text
    model = nn.Linear(1, 1, bias=False)
    averager = LatestWeightAverager(k=16, horizon=1 / 4, samples=16)
    complete = []
    for step in range(1, 40):
        model.weight.data.fill_(float(step))
        averager.step(model)
        if averager.ready and averager.average()["weight"].item() == (1 + step) / 2:
            complete.append(step)
        assert averager.ready == (step >= 16)
    assert complete == list(range(16, 32))


def test_rows_for_a_report(bench: Bench) -> None:
    (writing,) = blocks("report.md", "Your own rows", "python")
    bench.restart()
    bench.names["averager"] = averager = LatestWeightAverager(k=2)
    for _ in range(2):
        averager.collect(bench.model)
    bench.run(writing)
    rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    found = {(row["weights"], row["batch_norm"], row["epoch"]) for row in rows}
    assert found >= {("raw", None, 4), ("raw", "re-estimated", 4), ("averaged", "re-estimated", 4)}
    assert all("valid_loss" in row for row in rows)


def test_fixed_windows(bench: Bench) -> None:
    (setting,) = blocks(
        "fixed_windows.md", "A window of fixed length: k, ν and the start", "python"
    )
    bench.run(setting)
    assert bench.names["nu"] == 100
    averager = bench.names["averager"]
    collected = [step for step in range(1, 5001) if averager.step(bench.model)]
    assert collected[:2] == [3100, 3200]

    bench.restart()
    bench.names["averager"] = averager = LatestWeightAverager(k=6, schedule=Every(10))
    for batch in bench.names["train_loader"][:100]:
        bench.step(bench.model, batch)
        averager.step(bench.model)
    (sizes,) = blocks("fixed_windows.md", "Find out", "python")
    exec(sizes, bench.names)
    expected = [mean(spaced(bench.history, k, 10)) for k in (2, 3, 6)]
    assert all(map(same_bits, bench.evaluated, expected))
    assert len(bench.evaluated) == 3


def test_window_choice(bench: Bench) -> None:
    title = "Let the validation choose the window"
    (loop,) = blocks("window_choice.md", title, "python")
    bench.names["evaluate"] = lambda model: model[0].weight.square().sum().item()
    bench.run(loop)
    weights = bench.history[4::5]  # one snapshot per epoch of five steps
    windows = {0: weights[-1], 1: weights[-1], 4: mean(weights[-4:])}
    choice, saved = bench.names["choice"], torch.load("best.pt", weights_only=True)
    assert choice.values == {k: w.square().sum().item() for k, w in windows.items()}
    assert choice.k == 4
    assert same_bits(saved["0.weight"], windows[4])

    (options,) = blocks("window_choice.md", "Options", "python")
    bench.names["accuracy"] = bench.names["evaluate"]
    exec(options, bench.names)
    assert sorted(bench.names["choice"].values) == [0, 2, 4]
    for block in blocks("window_choice.md", "In the callbacks", "python"):
        exec(block, bench.names)


def test_what_is_said_of_emas() -> None:
    """Their age and that of a window, what is left of the past, and bfloat16 that stands still."""
    for decay, steps in ((0.99, 200), (0.999, 2000), (0.9999, 20000)):
        age = sum((1 - decay) * decay**i * i for i in range(int(30 / (1 - decay))))
        assert age == pytest.approx(decay / (1 - decay), rel=1e-6)
        assert age == pytest.approx(9 * (steps / 10) / 2, rel=0.12)  # k = 10; (k - 1) / k
        assert decay**steps == pytest.approx(0.135, abs=0.002)
    average = [torch.tensor([1.0, -3.0, 0.02], dtype=torch.bfloat16)]
    newest = [torch.tensor([1.9, -5.9, 0.001], dtype=torch.bfloat16)]
    before = average[0].clone()
    for _ in range(100):
        get_ema_multi_avg_fn(0.999)(average, newest, 1)
    assert same_bits(average[0], before)


def lightning_run(folder: Path) -> list[Tensor]:
    """Checkpoints beside Lightning's own EMA: the raw weights of each epoch are returned."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.history: list[Tensor] = []

        def training_step(self, batch: Tensor) -> Tensor:
            return (self.layer(batch) - 1).square().mean()

        def on_train_epoch_end(self) -> None:
            self.history.append(self.layer.weight.detach().clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=5,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[EMAWeightAveraging(decay=0.5), ModelCheckpoint(folder, save_top_k=-1)],
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2))
    return module.history


def test_lightning_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    history = lightning_run(tmp_path / "lightning_run")
    (words,) = commands("coming-from.md", "Lightning, Transformers, Accelerate")
    assert main._run(words) == 0
    state = torch.load("raw-mean.ckpt", weights_only=True)
    found = [tensor for tensor in tensors(state) if tensor.shape == (1, 2)]
    assert len(found) == 1
    assert same_bits(found[0], mean(history[-3:]))
    newest = max((tmp_path / "lightning_run").iterdir(), key=lambda path: path.stat().st_mtime)
    checkpoint = torch.load(newest, weights_only=True)
    assert same_bits(checkpoint["current_model_state"]["layer.weight"], history[-1])
    assert not same_bits(checkpoint["state_dict"]["layer.weight"], history[-1])


def tensors(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [t for value in tree.values() for t in tensors(value)] if isinstance(tree, dict) else []


def test_mergekit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = {}
    for name in "ABC":
        Path(name).mkdir()
        models[name] = torch.randn(5, 3)
        save_file({"w": models[name]}, f"{name}/model.safetensors", {"format": "pt"})
        Path(name, "config.json").write_text(json.dumps({"model": name}))
        Path(name, "tokenizer.json").write_text(json.dumps({"tokens": name}))
    (words,) = commands("coming-from.md", "mergekit: linear")
    assert main._run(words) == 0
    expected = (models["A"].double() + 2 * models["B"].double() + models["C"].double()) / 4
    assert same_bits(load_file("OUT/model.safetensors")["w"], expected.float())
    assert json.loads(Path("OUT/config.json").read_text()) == {"model": "C"}
    assert json.loads(Path("OUT/tokenizer.json").read_text()) == {"tokens": "C"}


def test_average_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as fairseq writes them: objects beside the weights, best and last, epochs, updates."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    history: dict[str, Tensor] = {}

    def save(name: str) -> None:
        history[name] = torch.randn(4, 3).half()
        extra = {"args": argparse.Namespace(lr=[0.1]), "cfg": {"model": argparse.Namespace()}}
        torch.save({**extra, "model": {"w": history[name]}}, f"run/checkpoint{name}.pt")

    for epoch in range(1, 54):
        save(str(epoch))
    for number in range(1, 12):
        save(f"_{number}_{100 * number}")
    save("_best")
    save("_last")

    lasts = [range(48, 54), range(45, 51), [f"_{n}_{100 * n}" for n in range(6, 12)]]
    words = commands("coming-from.md", "average_checkpoints.py (fairseq and its relatives)")
    assert len(words) == len(lasts)
    for line, last in zip(words, lasts, strict=True):
        assert main._run(line) == 0
        result = torch.load(line[-1], weights_only=True)
        assert list(result) == ["model"]
        expected = sum(history[str(name)].double() for name in last) / 6
        assert same_bits(result["model"]["w"], expected.half())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
def test_averager(bench: Bench) -> None:
    (loop,) = blocks("averager.md", "The averager in your loop", "python")
    bench.names |= {"val_loader": None, "evaluate": lambda model, loader: bench.evaluate(model)}
    bench.run(loop)
    epochs = bench.history[4::5]
    assert same_bits(bench.evaluated[-1], mean(epochs[-6:]))
    assert len(bench.evaluated) == 2
    (when,) = blocks("averager.md", "When to collect", "python")
    exec(when, bench.names)

    average = bench.names["averager"].average()
    (resume,) = blocks("averager.md", "Resuming", "python")
    del bench.names["torch"]  # the block imports what it uses
    exec(resume, bench.names)
    assert all(map(same_bits, bench.names["averager"].average().values(), average.values()))
    (sharded,) = blocks("sharded.md", "Saving and loading", "python")
    exec(sharded, bench.names | {"resuming": False, "folder": "checkpoint"})
    exec(sharded, bench.names | {"resuming": True, "folder": "checkpoint"})

    model, averager = tiny_model(), LatestWeightAverager(k=6)
    for value in range(6):
        model.lm_head.weight.data.fill_(value)
        averager.collect(model)
    names = {"torch": torch, "transformers": transformers, "model": model, "averager": averager}
    (export,) = blocks("export.md", "Exporting the average", "python")
    exec(export, names)
    assert torch.equal(names["model"].lm_head.weight, torch.full_like(model.lm_head.weight, 2.5))
    small = load_file("small/model.safetensors")["lm_head.weight"]
    assert (small.dtype, small.unique().item()) == (torch.bfloat16, 4)


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    history = {step: torch.randn(3, 2) for step in range(1000, 15000, 500)}
    for step, weight in history.items():
        Path(f"runs/gpt/step-{step}").mkdir(parents=True)
        save_file({"w": weight}, f"runs/gpt/step-{step}/model.safetensors")
        state = {"global_step": step, "log_history": [{"step": step, "eval_loss": step % 3500}]}
        Path(f"runs/gpt/step-{step}/trainer_state.json").write_text(json.dumps(state))
    losses = [json.dumps({"step": step, "valid_loss": -step}) for step in history]
    Path("losses.jsonl").write_text("\n".join(losses))
    files = {name: torch.randn(4) for name in "ab"}
    for name, weight in files.items():
        torch.save({"w": weight}, f"{name}.pt")
    save_file({"w": files["a"]}, "a.safetensors")
    Path("mymodel").mkdir()
    Path("mymodel/evaluation.py").write_text(
        "def evaluate(s): return {'loss': s['w'][0, 0].item()}\n"
    )

    for section in ("Average", "Sweep: every k at once", "Watch: follow a live run", "Inspect"):
        for words in commands("offline.md", section):
            once = ["--once", "--settle", "0"] if words[0] == "watch" else []
            if not any(word.startswith("s3://") for word in words):
                assert main._run([*words, *once]) == 0, words
    (python,) = blocks("offline.md", "From Python", "python")
    exec(python.replace('"averaged"', '"python"'), {})

    def window(newest: int, k: int) -> Tensor:
        return mean([history[newest - 500 * age] for age in range(k)])

    expected = {"averaged": window(14500, 6), "at-9000": window(9000, 6)}
    expected |= {"latest": window(14500, 6), "averages/step-14500": window(14500, 6)}
    expected |= {"python": window(14500, 6), "best-valid": window(14500, 5)}
    # The lowest remainders of 3500: those of 3500 to 14000, and the newest with 500.
    expected |= {"best": mean([history[step] for step in (3500, 7000, 10500, 14000, 14500)])}
    for folder, weight in expected.items():
        assert same_bits(load_file(f"{folder}/model.safetensors")["w"], weight), folder
    assert same_bits(
        torch.load("mean.pt")["w"], ((files["a"].double() + 3 * files["b"].double()) / 4).float()
    )
    rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    found = {(row["step"], row["k"]): row["loss"] for row in rows}
    for k in (2, 4, 6, 10, 16):
        assert found[14500, k] == window(14500, k)[0, 0].item()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of PyTorch's reader
def test_torchtitan_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that torchtitan wrote; its own code is in test_torchtitan.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    unpack_recorded(tmp_path / "outputs")
    Path("titanmodel").mkdir()
    Path("titanmodel/evaluation.py").write_text(
        "def evaluate(s): return {'loss': s['norm.weight'][0].item()}\n"
    )
    for words in commands("torchtitan.md", "Checkpoints on disk"):
        once = ["--once", "--settle", "0"] if words[0] == "watch" else []
        assert main._run([*words, *once]) == 0, words
    run = tmp_path / "outputs" / "checkpoint"
    states = [weights_of(load(run / f"step-{step}")) for step in (2, 4, 6)]
    for result in ("averaged", "latest"):
        found = weights_of(load(tmp_path / result))
        assert found.keys() == states[0].keys()
        for name, tensor in found.items():
            assert same_bits(tensor, mean([state[name] for state in states])), name
    rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    values = {row["k"]: row["loss"] for row in rows if row["step"] == 6}
    norms = [state["norm.weight"] for state in states]
    assert values == {k or None: mean(norms[-k or -1 :])[0].item() for k in (0, 2, 3)}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("choosing", ROOT / "benchmarks" / "choosing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_choosing(script: ModuleType) -> None:
    """To write them anew: python benchmarks/choosing.py --write."""
    text = script.PAGE.read_text()
    assert script.filled(text) == text
    assert sum(line.startswith("| --- ") for line in text.splitlines()) == len(script.TABLES)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_closed_form_against_samples(script: ModuleType, schedule: str) -> None:
    """SGD with random numbers, averaged by the averager and by an EMA: the losses in the mean."""
    h = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    steps, k, nu, decay = 400, 5, 20, 0.97
    run = script.Quadratic(schedule, h.numpy(), steps=steps)
    x, ema = torch.ones(20_000, 3, dtype=torch.float64), torch.ones(20_000, 3, dtype=torch.float64)
    averager = LatestWeightAverager(k=k, schedule=Every(nu))
    for rate in run.rates[:300]:
        noise = torch.randn_like(x) * (script.NOISE * h).sqrt()
        x = x - rate * (h * x + noise)
        ema = decay * ema + (1 - decay) * x
        averager.step({"x": x})

    def loss(x: Tensor) -> float:
        return ((h * x**2).sum(1) / 2).mean().item()

    assert run.raw(300) == pytest.approx(loss(x), rel=0.04)
    assert run.window(300, k, nu) == pytest.approx(loss(averager.average()["x"]), rel=0.04)
    assert run.ema(300, decay) == pytest.approx(loss(ema), rel=0.04)
