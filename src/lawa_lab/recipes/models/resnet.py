"""ResNets (He et al., 2016), because the CPU build of PyTorch has no torchvision.

`stem="image"` is the 7x7 stem with max-pooling for 224-pixel images, `stem="small"` the 3x3 stem
without it for 32-pixel ones. `width` is the number of channels of the first stage; 64 gives the
published nets. Parameter names follow torchvision's.
"""

from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["ResNet", "resnet34", "resnet50"]

Stem = Literal["image", "small"]


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class _Basic(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class _Bottleneck(nn.Module):
    """1x1, 3x3 (which strides) and 1x1 convolutions."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Four stages of residual blocks.

    >>> resnet34(10, stem="small")(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        block: type[_Basic] | type[_Bottleneck],
        depths: tuple[int, int, int, int],
        num_classes: int,
        stem: Stem,
        width: int,
    ) -> None:
        super().__init__()
        small = stem == "small"
        self.conv1 = _conv(3, width, 3) if small else _conv(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        channels, stages = width, []
        for i, depth in enumerate(depths):
            layers = []
            for j in range(depth):
                layers.append(block(channels, width * 2**i, 2 if i and not j else 1))
                channels = width * 2**i * block.expansion
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def resnet34(num_classes: int, *, stem: Stem = "image", width: int = 64) -> ResNet:
    """ResNet-34; 21,328,292 parameters with the small stem and 100 classes."""
    return ResNet(_Basic, (3, 4, 6, 3), num_classes, stem, width)


def resnet50(num_classes: int, *, stem: Stem = "image", width: int = 64) -> ResNet:
    """ResNet-50; 25,557,032 parameters with 1000 classes."""
    return ResNet(_Bottleneck, (3, 4, 6, 3), num_classes, stem, width)
