"""Load buckets with runs of experts inside an SGLang process, through its
``--custom-weight-loader``.

    trainer ── /update_weights_from_tensor, load_format = the dotted path of `load` ──► rank
               a flat bucket and its table      a run of experts: one copy
                                                the rest: the model's load_weights

SGLang's own loaders process a mixture of experts weight by weight, in Python: seconds for a 30B
model, although copying takes a tenth of a second. They still decide where a weight belongs. Before
the first copy into a kind of layer, one expert is loaded with ``load_weights``. The others are
copied only if that expert then lies where a copy would have put it. If not (some runner backends
order or quantise experts differently), every expert is loaded with ``load_weights``.
"""

from __future__ import annotations

import json
import logging
import weakref
from typing import Any

import torch
from torch import nn

from slime.engines.sglang.weight_probe import SIZE, HeldExperts, Tree
from slime.engines.wire.buckets import TensorEntry, unpack
from slime.engines.wire.expert_runs import ExpertRun

logger = logging.getLogger(__name__)

NamedTensors = list[tuple[str, torch.Tensor]]


def load(model: nn.Module, named_tensors: NamedTensors) -> None:
    """Load a bucket; SGLang's hook for custom weight loaders.

    Args:
        named_tensors: a flat uint8 bucket on this rank's GPU, and its table, JSON in a uint8
            tensor: a list of `TensorEntry` as in `TensorEntry.to_json`.
    Raises:
        ValueError: an entry reaches beyond the bucket.
    """
    (_, bucket), (_, raw) = named_tensors
    rows = json.loads(raw.cpu().numpy().tobytes())
    experts = _experts_of(model)
    rest: NamedTensors = []
    for name, tensor in unpack(bucket, [TensorEntry.from_json(row) for row in rows]):
        run = ExpertRun.parse(name)
        if run is None:
            rest.append((name, tensor))
        elif not experts.take(run, tensor):
            rest.extend(run.split(tensor))
    if rest:
        _load_weights(model, rest)


class StackedExperts:
    """The stacked experts of one model.

    Layers of the same class, parameter and shape are of one kind, and are treated alike.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._tree = Tree(model)
        self._is_plain: dict[tuple[Any, ...], bool] = {}

    def take(self, run: ExpertRun, sent: torch.Tensor) -> bool:
        """Copy this rank's part of [experts, out, in]; return False if the engine lays experts out
        differently."""
        held = self._tree.experts(run)
        if held is None:
            return False
        module = self._tree.modules[run.owner]
        kind = type(module), run.projection, run.leaf, tuple(held.target.shape[1:])
        # this rank holds none of these experts, if the layout is as expected
        if held.first == held.stop:
            return self._is_plain.get(kind, False)
        if kind not in self._is_plain:
            self._is_plain[kind] = self._lies_plainly(run, held, sent)
        if self._is_plain[kind]:
            held.target.copy_(held.of(sent))
        return self._is_plain[kind]

    def _lies_plainly(self, run: ExpertRun, held: HeldExperts, sent: torch.Tensor) -> bool:
        """Load one expert with ``load_weights``; return whether it then lies where a copy would
        have put it."""
        model = self._model()
        wanted = held.of(sent)
        # some layers hold the sizes of quantised weights as floats
        fits = wanted.dtype == held.target.dtype or run.leaf == SIZE
        if model is None or wanted.shape != held.target.shape or not fits:
            return False
        _load_weights(model, [(run.expert_name(run.first + held.first), sent[held.first])])
        is_there = _same(held.target[0], wanted[0])
        if not is_there:
            logger.info(
                "%s: experts are not held as they are sent; they are loaded one by one",
                held.parameter,
            )
        return is_there


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype.itemsize == 1:  # torch cannot compare 8-bit floats
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return torch.equal(one, other.to(one.dtype))


_known: weakref.WeakKeyDictionary[nn.Module, StackedExperts] = weakref.WeakKeyDictionary()


def _experts_of(model: nn.Module) -> StackedExperts:
    if model not in _known:
        _known[model] = StackedExperts(model)
    return _known[model]


def _load_weights(model: Any, weights: NamedTensors) -> None:
    model.load_weights(weights)
