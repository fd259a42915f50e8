"""A small detector without anchors: each cell of a grid says whether the middle of a digit is in it, its box and its class."""

import torch
import torchmetrics
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, l1_loss

CELL, SIDE = 8, 80  # pixels of a cell; the largest side of a picture


class Grid(nn.Module):
    """Pictures [rows, 1, SIDE, SIDE] to [rows, cells, 5 + classes]: objectness, box, scores."""

    def __init__(self, width, classes):
        super().__init__()
        layers, channels = [], 1
        for step in range(3):
            out = width * 2**step
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU()]
            layers += [nn.Conv2d(out, out, 3, stride=2, padding=1), nn.GroupNorm(4, out), nn.ReLU()]
            channels = out
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(channels, 5 + classes, 1)

    def forward(self, image):
        return self.head(self.layers(image)).flatten(2).transpose(1, 2)


class Detector:
    """The recipe. `boxes` is the label, five numbers a digit; a batch has them padded with -1."""

    def __init__(self, width=16, classes=10, most=8, learning_rate=3e-3):
        self.width, self.classes, self.most, self.learning_rate = width, classes, most, learning_rate

    def build_model(self, schema):
        return Grid(self.width, self.classes)

    def canvas(self, batch):
        """Put pictures of several sizes on one canvas, at the top left."""
        starts, shapes = batch["image_offsets"], batch["image_shape"]
        canvas = torch.zeros(len(shapes), 1, SIDE, SIDE, device=shapes.device)
        for row, (height, width, _) in enumerate(shapes.tolist()):
            pixels = batch["image"][starts[row] : starts[row + 1]]
            canvas[row, 0, :height, :width] = pixels.reshape(height, width).float() / 255
        return canvas

    def loss(self, model, batch):
        found, boxes = model(self.canvas(batch)), batch["boxes"].unflatten(1, (-1, 5))
        row, which = torch.nonzero(boxes[..., 4] >= 0, as_tuple=True)
        truth = boxes[row, which]
        cell = self.cell_of(truth)
        there = torch.zeros(found.shape[:2], device=found.device)
        there[row, cell] = 1
        chosen = found[row, cell]
        parts = {
            "objectness": binary_cross_entropy_with_logits(found[..., 0], there),
            "box": l1_loss(chosen[:, 1:5], self.relative(truth, cell)),
            "class": cross_entropy(chosen[:, 5:], truth[:, 4].long()),
        }
        return {"loss": 10 * parts["objectness"] + parts["box"] + parts["class"], **parts}

    def cell_of(self, boxes):
        """Return the number of the cell that holds each box's middle."""
        middle = ((boxes[:, :2] + boxes[:, 2:4]) / 2 / CELL).long()
        return middle[:, 1] * (SIDE // CELL) + middle[:, 0]

    def corner(self, cell):
        return torch.stack([cell % (SIDE // CELL), cell // (SIDE // CELL)], 1).float() * CELL

    def relative(self, boxes, cell):
        """Measure a box from its cell's corner, in cells."""
        return (boxes[:, :4] - self.corner(cell).repeat(1, 2)) / CELL

    def predict(self, model, batch):
        """Return [rows, most, 6]: box, class and confidence of each digit; a place without one is NaN."""
        found = model(self.canvas(batch))
        grid = found[..., 0].sigmoid().unflatten(1, (SIDE // CELL, -1))
        peak = grid == nn.functional.max_pool2d(grid.unsqueeze(1), 3, 1, 1).squeeze(1)
        confidence, cell = (grid * peak).flatten(1).topk(self.most, dim=1)
        chosen = found.gather(1, cell.unsqueeze(-1).expand(-1, -1, found.shape[-1]))
        corner = self.corner(cell.flatten()).unflatten(0, cell.shape).repeat(1, 1, 2)
        confidence, kind = confidence.unsqueeze(-1), chosen[..., 5:].argmax(-1, keepdim=True)
        answer = torch.cat([chosen[..., 1:5] * CELL + corner, kind, confidence], 2)
        return answer.masked_fill(confidence < 0.5, torch.nan)

    def metrics(self):
        return {"recall": torchmetrics.MeanMetric(), "precision": torchmetrics.MeanMetric()}

    def measure(self, metrics, output, batch):
        """A digit is found if a box of its class covers it with an intersection over union of a half."""
        for found, truth in zip(output, batch["boxes"].unflatten(1, (-1, 5)), strict=True):
            found, truth = found[~found[:, 0].isnan()], truth[truth[:, 4] >= 0]
            hit = (overlap(found[:, :4], truth[:, :4]) >= 0.5) & (found[:, 4:5] == truth[:, 4])
            metrics["recall"].update(hit.any(0).float())
            metrics["precision"].update(hit.any(1).float() if len(found) else torch.zeros(1))

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)


def overlap(one, other):
    """Return the intersection over union of each box with each."""
    corners = torch.maximum(one[:, None, :2], other[None, :, :2]), torch.minimum(one[:, None, 2:], other[None, :, 2:])
    common = (corners[1] - corners[0]).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (one, other)]
    return common / (areas[0][:, None] + areas[1][None] - common)
