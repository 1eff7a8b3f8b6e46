"""Ways to choose a window, on the digits: the tables of docs/guides/window_choice.md.

    python benchmarks/window_choice.py    print the tables (about 20 seconds)

A small network is trained for 50 epochs at a constant rate and with a cosine, five seeds each. A
ring of 16 snapshots always spans the last quarter of the run so far. After each epoch the raw
weights and the windows of 1, 4, 8 and 16 snapshots are measured on validation and on test images.
Each way to choose then sees the same validation losses (or those of a quarter of the images, in the
last row of ways), and its choices are judged afterwards.
"""

import math
import statistics
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torch_lawa import LatestWeightAverager, WindowSearch

K, SHARE, EPOCHS, BATCH, RATE, SEEDS = 16, 1 / 4, 50, 32, 0.2, 5
SIZES = {"train": 1000, "valid": 400, "test": 397}
Losses = dict[int, float]  # by k; 0 are the raw weights
Row = tuple[int, dict[str, Losses]]  # how many snapshots there were, and losses by data set
WAYS = {
    "all windows (default)": (WindowSearch(), "valid"),
    "all windows, margin 0": (WindowSearch(margin=0.0), "valid"),
    "neighbours, all every 4th time": (WindowSearch(full_every=4), "valid"),
    "neighbours only": (WindowSearch(full_every=10**6), "valid"),
    "all windows, on 100 of the 400 images": (WindowSearch(), "quarter"),
}


def run(seed: int, cosine: bool) -> list[Row]:
    """One row after each epoch."""
    torch.manual_seed(seed)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    train, valid, test = torch.randperm(len(images)).split(list(SIZES.values()))
    parts = {"valid": valid, "quarter": valid[:100], "test": test}
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    averager, ratio = LatestWeightAverager(K), (1 - SHARE) ** (-1 / K)
    step, last, rows = 0, 0, []
    total = EPOCHS * math.ceil(len(train) / BATCH)

    def loss(part: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images[part]), labels[part])

    @torch.no_grad()
    def measured() -> dict[str, float]:
        return {name: loss(part).item() for name, part in parts.items()}

    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train))].split(BATCH):
            for group in optimizer.param_groups:
                share = (1 + math.cos(math.pi * step / total)) / 2
                group["lr"] = RATE * (share if cosine else 1.0)
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
            step += 1
            if step >= max(last * ratio, last + 1):
                averager.collect(model, step=step)
                last = step
        found = {0: measured()}
        for k in WindowSearch().candidates(averager):
            with averager.swapped_into(model, k):
                found[k] = measured()
        losses = {name: {k: each[name] for k, each in found.items()} for name in parts}
        rows.append((len(averager), losses))
    return rows


class Ring:
    """As many snapshots as there were."""

    def __init__(self, size: int) -> None:
        self.k, self.num_averaged = K, size

    def __len__(self) -> int:
        return self.num_averaged


def judge(search: WindowSearch, seen: str, runs: list[list[Row]]) -> list[str]:
    passes, kept, worse, test = [], [], 0, []
    for rows in runs:
        search.reset()
        for size, losses in rows:
            valid = losses["valid"]
            ks = search.candidates(Ring(size))  # type: ignore[arg-type]
            k = search.decide({n: losses[seen][n] for n in (0, *ks)})
            gain = valid[0] - min(valid.values())
            kept.append((valid[0] - valid[k]) / gain if gain else 1.0)
            passes.append(len(ks))
            worse += valid[k] > valid[0]
            test.append(losses["test"][k])
    within = sum(share >= 0.98 for share in kept) / len(kept)
    numbers = f"{statistics.mean(passes):.1f} | {within:.0%} | {statistics.mean(kept):.0%}"
    return [numbers, str(worse), f"{statistics.mean(test):.4f}"]


def main() -> None:
    """Print one table per schedule."""
    torch.set_num_threads(1)
    for cosine in (False, True):
        runs = [run(seed, cosine) for seed in range(SEEDS)]
        print("\n" + ("Cosine to zero" if cosine else "Constant rate"))
        print("| | passes | within 2 % | gain kept | worse than raw | mean test loss |")
        print("| --- | --- | --- | --- | --- | --- |")
        fixed: dict[str, Callable[[Losses], int]] = {
            "raw weights": lambda losses: 0,
            "always the largest window": max,
        }
        for name, (search, seen) in WAYS.items():
            print(f"| {name} | " + " | ".join(judge(search, seen, runs)) + " |")
        for name, pick in fixed.items():
            rows = [losses for rows in runs for _, losses in rows]
            worse = sum(row["valid"][pick(row["valid"])] > row["valid"][0] for row in rows)
            mean = statistics.mean(row["test"][pick(row["test"])] for row in rows)
            print(f"| {name} | | | | {worse} | {mean:.4f} |")


if __name__ == "__main__":
    main()
