"""A timm ResNet on scikit-learn's digits, averaged and saved as a checkpoint that timm reads.

pip install 'torch-lawa[lab]' timm && python examples/timm_resnet.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim.swa_utils import update_bn

from torch_lawa import LatestWeightAverager
from torch_lawa.integrations.timm import timm_checkpoint
from torch_lawa.integrations.torch_swa import to_averaged_model

EPOCHS, BATCH = 12, 64


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The fraction of `images` that are classified correctly."""
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


def main(path: str = "last.pth.tar") -> tuple[float, float]:
    """Train, save, and load both sets of weights again; returns their test accuracies."""
    torch.manual_seed(0)
    digits = load_digits()
    images = interpolate(
        torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, scale_factor=2
    )
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1400), slice(1400, None)
    batches = list(zip(images[train].split(BATCH), labels[train].split(BATCH), strict=True))

    model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = LatestWeightAverager(k=4)
    for epoch in range(EPOCHS):
        model.train()
        for i in torch.randperm(len(batches)).tolist():
            optimizer.zero_grad()
            cross_entropy(model(batches[i][0]), batches[i][1]).backward()
            optimizer.step()
        averager.collect(model)
        if averager.ready:
            averaged = to_averaged_model(averager, model)
            update_bn(batches, averaged)
            raw, mean = (accuracy(m, images[test], labels[test]) for m in (model, averaged))
            print(
                f"epoch {epoch + 1:2d}   raw {raw:.1%}   mean of the last {averager.k} {mean:.1%}"
            )
            entries = {"epoch": epoch, "optimizer": optimizer.state_dict()}
            torch.save(timm_checkpoint(model, averaged, **entries), path)

    scores = []
    for use_ema in (False, True):
        loaded = timm.create_model("test_resnet", num_classes=10, in_chans=1)
        timm.models.load_checkpoint(loaded, path, use_ema=use_ema)
        scores.append(accuracy(loaded, images[test], labels[test]))
    print(f"loaded by timm   raw {scores[0]:.1%}   averaged {scores[1]:.1%}")
    return scores[0], scores[1]


if __name__ == "__main__":
    main()
