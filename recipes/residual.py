"""ResNet-18, 34 and 50, in plain torch, with torchvision's parameter names so that its weights load.

Reference:
    K. He et al., Deep residual learning for image recognition, 2015. The stride of a bottleneck sits in its 3x3
    convolution, as in the "v1.5" that torchvision and NVIDIA train; the first paper has it in the first 1x1.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["ARCHITECTURES", "STEMS", "BasicBlock", "Bottleneck", "ResNet", "resnet", "training_flops"]

STEMS = ("imagenet", "cifar")
"""A 7x7 stride-2 convolution and a max-pool (224-pixel photographs), or a 3x3 stride-1 convolution (small images)."""


def _convolution(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: ``relu(x + f(x))``.

    Args:
        in_channels: channels of the input.
        width: channels inside the block.
        stride: of the first convolution; the output is that much smaller.

    Shapes:
        ``(N, in_channels, H, W) -> (N, width, ceil(H / stride), ceil(W / stride))``.
    """

    expansion: ClassVar[int] = 1

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the block; see the class for shapes."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        out: Tensor = self.relu(x + shortcut)
        return out

    def last_norm(self) -> nn.BatchNorm2d:
        """Returns the norm before the addition."""
        return self.bn2


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut: ``relu(x + f(x))``.

    Args:
        in_channels: channels of the input.
        width: channels of the 3x3 convolution; the output has four times as many.
        stride: of the 3x3 convolution.

    Shapes:
        ``(N, in_channels, H, W) -> (N, 4 * width, ceil(H / stride), ceil(W / stride))``.
    """

    expansion: ClassVar[int] = 4

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the block; see the class for shapes."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        out: Tensor = self.relu(x + shortcut)
        return out

    def last_norm(self) -> nn.BatchNorm2d:
        """Returns the norm before the addition."""
        return self.bn3


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The shortcut of a block whose output has another shape than its input."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, a mean over the pixels and a linear layer.

    Args:
        block: the class of the blocks.
        depths: blocks in each of the four stages.
        num_classes: number of logits.
        in_channels: channels of the images: 3 for colour, 1 for grey.
        stem: one of :data:`STEMS`.
        width: channels of the first stage; each later stage has twice as many. torchvision's networks have 64.
        zero_init_residual: start the last norm of each block at zero, so that each block starts as the identity
            (Goyal et al., 2017, section 5.1).

    Raises:
        ValueError: an unknown stem, or a count below 1.

    Shapes:
        ``(N, in_channels, H, W) -> (N, num_classes)``, floating point.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        stem: str = "imagenet",
        width: int = 64,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        if stem not in STEMS:
            raise ValueError(f"Expected stem to be one of {STEMS}. Got {stem!r}. Choose one of these.")
        for name, value in (("num_classes", num_classes), ("in_channels", in_channels), ("width", width)):
            if value < 1:
                raise ValueError(f"Expected {name} to be at least 1. Got {value}. Raise it.")
        if stem == "imagenet":
            self.conv1 = _convolution(in_channels, width, 7, 2)
        else:
            self.conv1 = _convolution(in_channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if stem == "imagenet" else nn.Identity()
        stages, channels = [], width
        for index, depth in enumerate(depths):
            stage_width = width * 2**index
            blocks = [block(channels, stage_width, stride=1 if index == 0 else 2)]
            channels = stage_width * block.expansion
            blocks += [block(channels, stage_width) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        self._initialise(zero_init_residual)

    def _initialise(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # He et al., Delving deep into rectifiers, 2015: gradients keep their variance from layer to layer.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, (BasicBlock, Bottleneck)):
                nn.init.zeros_(module.last_norm().weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits; see the class for shapes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


ARCHITECTURES: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}
"""Name of a network: its block, and how many of them each stage has."""


def resnet(
    name: str,
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    stem: str = "imagenet",
    width: int = 64,
    zero_init_residual: bool = False,
) -> ResNet:
    """Builds a network by name.

    Args:
        name: a key of :data:`ARCHITECTURES`.
        num_classes: see :class:`ResNet`, as for the others.
        in_channels: channels of the images.
        stem: one of :data:`STEMS`.
        width: channels of the first stage.
        zero_init_residual: start each block as the identity.

    Raises:
        ValueError: an unknown name, or what :class:`ResNet` refuses.

    Collectives:
        None.
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"Expected a network of {sorted(ARCHITECTURES)}. Got {name!r}. Choose one of these.")
    block, depths = ARCHITECTURES[name]
    return ResNet(
        block,
        depths,
        num_classes=num_classes,
        in_channels=in_channels,
        stem=stem,
        width=width,
        zero_init_residual=zero_init_residual,
    )


def training_flops(model: ResNet, image_shape: Sequence[int]) -> int:
    """Counts the floating-point operations that one image costs in a training step: forward and backward.

    A multiplication and an addition count as two. Convolutions and the linear layer are counted, and nothing else:
    norms, additions and the optimizer are below a hundredth of them.

    Args:
        model: a network on the meta device, where counting costs no arithmetic; its gradients are not touched.
        image_shape: ``(channels, height, width)`` of one image.

    Returns:
        Operations per image.

    Raises:
        ValueError: the model is not on the meta device.

    Collectives:
        None.
    """
    parameters = list(model.parameters())
    if any(parameter.device.type != "meta" for parameter in parameters):
        raise ValueError("Expected a model on the meta device. Got a real one. Build it under torch.device('meta').")
    # Two images, since a BatchNorm over a single value refuses to train.
    images = torch.empty(2, *image_shape, device="meta", dtype=parameters[0].dtype)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(model(images).sum(), parameters)
    num_operations: int = counter.get_total_flops()
    return num_operations // 2
