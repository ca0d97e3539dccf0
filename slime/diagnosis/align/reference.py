"""The reference: the model in float32 in this process, with parts that can be computed differently.

Computation in 16 bits is emulated: products, norms and sums are computed in float32 and their
results rounded, like in the kernels. So each part can be rounded separately, which a dtype for the
whole model would not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slime.diagnosis.align.evidence import Scored
from slime.diagnosis.align.sight import Sight, behind, read_images
from slime.embedded.architecture import Architecture
from slime.embedded.attention import sees, softmax_with_sinks
from slime.embedded.images import FeatureCache
from slime.embedded.model import Heads
from slime.embedded.states import PrefillChunk, StateCache, StateRows
from slime.embedded.weights import WeightStore, make_store
from slime.models.images import ImageReader
from slime.models.mixers import mixers_of
from slime.models.spec import ModelSpec, RotaryKind
from slime.samples.media import Media

Part = Literal[
    "norms",
    "products",
    "rotary embedding",
    "activation",
    "attention scores",
    "attention",
    "router",
    "output layer",
]
PARTS: dict[Part, str] = {
    "norms": "RMS norms",
    "products": "matrix products and the sums behind them",
    "rotary embedding": "the rotary embedding",
    "activation": "the activation of MLPs",
    "attention scores": "scores and softmax of attention",
    "attention": "the probabilities of attention, and what they weigh",
    "router": "the scores of routers",
    "output layer": "the logits of the output layer",
}
#: Parts that a run in 16 bits rounds.
IN_16_BITS: frozenset[Part] = frozenset(
    part for part in PARTS if part not in ("attention scores", "router")
)
#: Rows of logits, and queries of attention, that are computed at a time.
_ROWS = 256
_QUERIES = 512
#: Suffix of the names of router weights.
_ROUTER = ".mlp.gate.weight"


@dataclass(frozen=True)
class Sampling:
    """How log-probs are computed from logits: the temperature, and the filters of sampling.

    Attributes:
        renormalised: log-probs are over the tokens that the filters keep; else over all tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    renormalised: bool = False

    def log_probs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probs of targets, float32 [rows], from logits [rows, vocab] and int64
        targets [rows]. A target that the filters drop gets its log-prob over all tokens."""
        log_probs = torch.log_softmax(logits / self.temperature, dim=-1)
        chosen = log_probs.gather(1, targets[:, None])[:, 0]
        if not self.renormalised:
            return chosen
        probs, order = log_probs.exp().sort(dim=-1, descending=True)
        before = probs.cumsum(-1) - probs
        kept = (before <= self.top_p) & (probs >= self.min_p * probs[:, :1])
        if self.top_k > 0:
            kept[:, self.top_k :] = False
        mass = (probs * kept).sum(-1)
        is_kept = (kept & (order == targets[:, None])).any(-1)
        return torch.where(is_kept, chosen - mass.log(), chosen)


@dataclass(frozen=True)
class ReferenceSettings:
    """How the reference computes.

    Attributes:
        rounded: parts with results that are rounded to ``dtype``.
        positions: (prompt length, length) → int64 [length]; None: 0, 1, 2, …
        rotary: fields of `ModelSpec` that replace the model's own.
        experts: replay the experts that the engine chose for the samples.
        cache_dtype: dtype to which keys and values are rounded; None: not rounded.
        sight: how image features and positions are computed.
    """

    rounded: frozenset[Part] = frozenset()
    dtype: torch.dtype = torch.bfloat16
    sampling: Sampling = Sampling()
    positions: Callable[[int, int], Tensor] | None = None
    rotary: Mapping[str, Any] | None = None
    experts: bool = False
    cache_dtype: torch.dtype | None = None
    sight: Sight = field(default_factory=Sight)


class Reference:
    """Computes log-probs of samples with the model of a Hugging Face directory.

    Args:
        dtype: the run's dtype, to which weights are rounded. Activations are not rounded: kernels
            round in different ways, and exact numbers are closest to all of them.
        replays: the run's trainer replays the engine's choice of experts, and so does this model.
        images: prepares the samples' images; None: the run reads only text.
    """

    def __init__(
        self,
        directory: str | Path,
        dtype: torch.dtype,
        sampling: Sampling = Sampling(),
        device: str = "cpu",
        *,
        replays: bool = False,
        images: ImageReader | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.dtype = dtype
        self.images = images
        self.arch = Architecture.from_dir(directory, sees_images=images is not None)
        longest = self.arch.spec.max_position_embeddings
        self.store: WeightStore = make_store(
            directory, self.arch, "float32", torch.device(device), longest, False
        )
        for linear in self.store.linears:
            linear.packs = False  # products then use F.linear, where `_Rounding` sees them
        self.setting = ReferenceSettings(sampling=sampling, experts=replays)
        self._features = FeatureCache()  # without rounding, of images prepared by ``images``
        if dtype != torch.float32:
            self.write(
                {name: tensor.to(dtype).float() for name, tensor in self.store.named.items()}
            )

    @property
    def low_dtype(self) -> torch.dtype:
        """The dtype for rounding: the run's if it has 16 bits, else bfloat16."""
        return torch.bfloat16 if self.dtype == torch.float32 else self.dtype

    def as_the_run(self) -> ReferenceSettings:
        """Return settings with the run's rounding; a run in float32 rounds nothing."""
        rounded = frozenset() if self.dtype == torch.float32 else IN_16_BITS
        return replace(self.setting, rounded=rounded, dtype=self.low_dtype)

    # -- weights -----------------------------------------------------------------------------------

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        self.store.update((name, tensor) for name, tensor in tensors.items())

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace weights of the reference, by name, within the block."""
        before = {name: self.store.named[name].clone() for name in tensors}
        self.write(tensors)
        try:
            yield
        finally:
            self.write(before)

    def matrices(self) -> dict[str, Tensor]:
        """Return name → matrix for the weights that quantisation applies to: matrices of layers,
        except routers."""
        named = self.store.named.items()
        return {
            name: t
            for name, t in named
            if ".layers." in name and t.dim() == 2 and not name.endswith(_ROUTER)
        }

    # -- log-probs ---------------------------------------------------------------------------------

    def of_all(
        self, samples: Sequence[Scored], setting: ReferenceSettings | None = None
    ) -> list[Tensor]:
        """Return the log-probs of each sample, float64 [R]."""
        return [self.log_probs(sample, setting) for sample in samples]

    def log_probs(
        self,
        sample: Scored,
        setting: ReferenceSettings | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Return the log-probs of a sample's response, float64 [R].

        Args:
            context: tokens that replace the sample's prompt.
        """
        setting = setting or self.setting
        return self.by_sampling(sample, [setting.sampling], setting, context)[0]

    @torch.inference_mode()
    def by_sampling(
        self,
        sample: Scored,
        samplings: Sequence[Sampling],
        setting: ReferenceSettings | None = None,
        context: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the log-probs for each of ``samplings`` from the same logits, float64 [R] each."""
        setting = setting or self.setting
        response = sample.tokens[sample.prompt_length :]
        if context is None:
            context = sample.tokens[: sample.prompt_length]
        media = self.media_behind(sample, context)
        assert media is not None, "a context without the places of its images"
        hidden = self.hidden(
            torch.cat([context, response]), len(context), setting, sample.experts, media=media
        )
        rows = hidden[len(context) - 1 :]
        found: list[list[Tensor]] = [[] for _ in samplings]
        for begin in range(0, len(rows), _ROWS):
            logits = self.store.model.logits(rows[begin : begin + _ROWS]).float()
            if "output layer" in setting.rounded:
                logits = logits.to(setting.dtype).float()
            targets = response[begin : begin + _ROWS].to(logits.device)
            tokens = torch.cat([context, response])
            for parts, sampling in zip(found, samplings, strict=True):
                changed = _penalised(logits, tokens, len(context) + begin, sampling)
                parts.append(sampling.log_probs(changed, targets))
        return [torch.cat(parts).double().cpu() for parts in found]

    def media_behind(self, sample: Scored, context: Tensor) -> list[Media] | None:
        """Return the sample's images at their places with ``context`` as the prompt; None if its
        placeholders do not match the images."""
        vision = self.arch.spec.vision
        if vision is None or torch.equal(context, sample.tokens[: sample.prompt_length]):
            return sample.media
        return behind(sample.media, sample.prompt_length, context, vision)

    def _states(self, count: int) -> StateRows | None:
        """Create the states for one sequence of ``count`` tokens; None for a model without gated
        delta nets."""
        spec = self.arch.spec
        if all(mixer.state is None for mixer in mixers_of(spec.transformer)):
            return None
        cache = StateCache(spec, torch.float32, self.store.device)
        cache.resize(1)
        return StateRows(cache, [PrefillChunk(0, 0, count, 0)])

    @torch.inference_mode()
    def hidden(
        self,
        tokens: Tensor,
        prompt: int,
        setting: ReferenceSettings,
        experts: Tensor | None = None,
        watcher: Watcher | None = None,
        media: Sequence[Media] = (),
    ) -> Tensor:
        """Return the output of the last norm, [L - 1, hidden], for all tokens except the last."""
        model = self.store.model
        count = len(tokens) - 1
        device = self.store.device
        positions = (
            torch.arange(count) if setting.positions is None else setting.positions(prompt, count)
        )
        rounding = "rotary embedding" in setting.rounded
        rope = self.arch.rope
        if setting.rotary:
            rope = replace(rope, spec=replace(self.arch.spec, **setting.rotary))
        axis_positions = None
        images = None
        if self.images is not None:
            images = read_images(media, len(tokens), setting.sight.read or self.images.read)
        vision = self.arch.spec.vision
        if images is not None and vision is not None and vision.kind.has_axes:
            moved = setting.sight.positions_of(images, count) + positions - torch.arange(count)
            axis_positions = moved.clamp(min=0)
        needed = int((positions if axis_positions is None else axis_positions).max()) + 1
        angles: dict[RotaryKind, tuple[Tensor, Tensor]] = {}
        for kind in self.arch.spec.rotary_kinds:
            cos, sin = replace(rope, kind=kind).tables(max(needed, 1), torch.float32)
            if rounding:
                cos = cos.to(setting.dtype).float()
                sin = sin.to(setting.dtype).float()
            angles[kind] = cos.to(device), sin.to(device)
        watcher = watcher or Watcher()
        if setting.experts and experts is not None:
            watcher.replayed = _rows_of(experts, count, self.arch, device)
        before = model.angles
        model.angles = angles
        rounds = _Rounding(setting, self.arch.spec.num_experts) if setting.rounded else None
        try:
            with rounds or nullcontext():
                both_ways: tuple[tuple[int, int], ...] = ()
                is_bidirectional = vision is not None and vision.kind.bidirectional
                if images is not None and is_bidirectional and not setting.sight.is_causal:
                    both_ways = images.blocks(0, count)
                attend = _Attention(setting, self.arch.spec, self._states(count), both_ways)
                seen = None
                if images is not None:
                    tower = self.store.tower
                    assert tower is not None
                    width = self.arch.spec.hidden_size
                    usual = rounds is None and setting.sight.read is None
                    cache = self._features if usual else FeatureCache()
                    seen = setting.sight.see(tower, images, count, width, cache, self.store.epoch)
                return model.forward(
                    tokens[:-1].to(device),
                    positions.to(device),
                    attend,
                    watcher.chosen,
                    watcher,
                    axis_positions=None if axis_positions is None else axis_positions.to(device),
                    seen=seen,
                )
        finally:
            model.angles = before


@dataclass
class Watcher:
    """An `Observer` that records outputs and choices of experts.

    Attributes:
        keeps: record outputs of parts in ``seen``.
        seen: part → [tokens, hidden].
        chosen: chosen experts of each layer with experts, in order.
        replayed: layer → experts to use instead.
    """

    keeps: bool = False
    seen: dict[str, Tensor] = field(default_factory=dict)
    chosen: list[Tensor] = field(default_factory=list)
    replayed: dict[int, Tensor] = field(default_factory=dict)

    def saw(self, name: str, value: Tensor) -> None:
        if self.keeps:
            self.seen[name] = value.float().cpu().clone()

    def experts(self, layer: int) -> Tensor | None:
        return self.replayed.get(layer)


def _rows_of(
    experts: Tensor, count: int, arch: Architecture, device: torch.device
) -> dict[int, Tensor]:
    """Return layer → experts, int64 [count, k], with -1 for unknown ones."""
    assert arch.experts is not None
    whole = torch.full((count, arch.spec.num_layers, arch.experts.chosen), -1, dtype=torch.int64)
    known = experts.reshape(-1, arch.spec.num_layers, arch.experts.chosen)[:count].to(torch.int64)
    whole[: len(known)] = known
    whole = whole.to(device)
    return {layer: whole[:, layer] for layer, has in enumerate(arch.experts.in_layer) if has}


def _penalised(logits: Tensor, tokens: Tensor, first: int, sampling: Sampling) -> Tensor:
    """Apply the repetition penalty for the tokens before each row. Row 0 predicts token
    ``first``."""
    if sampling.repetition_penalty == 1.0:
        return logits
    logits = logits.clone()
    for row in range(len(logits)):
        seen = tokens[: first + row].unique().to(logits.device)
        values = logits[row, seen]
        penalty = sampling.repetition_penalty
        logits[row, seen] = torch.where(values < 0, values * penalty, values / penalty)
    return logits


class _Rounding(TorchFunctionMode):
    """Rounds the results of parts of a forward pass, which it recognises by the torch function
    called."""

    def __init__(self, setting: ReferenceSettings, num_experts: int) -> None:
        super().__init__()
        parts: dict[Any, Part] = {F.rms_norm: "norms", F.linear: "products", F.silu: "activation"}
        parts |= {  # the first two are used by vision towers
            F.layer_norm: "norms",
            F.gelu: "activation",
            torch.addcmul: "rotary embedding",
            Tensor.add: "products",
            Tensor.__add__: "products",
        }
        self._parts = parts
        self._rounded = setting.rounded
        self._dtype = setting.dtype
        self._num_experts = num_experts

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        part = self._parts.get(function)
        if function is F.linear and self._num_experts and args[1].shape[0] == self._num_experts:
            part = "router"
        if part in self._rounded and result.is_floating_point():
            return result.to(self._dtype).to(result.dtype)
        return result


class _Attention:
    """Attention of one sequence, without a cache: causal, except within ``both_ways``.

    Args:
        both_ways: (start, end) of tokens that attend to each other in both directions.
    Attributes:
        states: initial states of gated delta nets.
    """

    def __init__(
        self,
        setting: ReferenceSettings,
        spec: ModelSpec,
        states: StateRows | None,
        both_ways: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._setting = setting
        self._spec = spec
        self._both_ways = both_ways
        self.states = states

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        queries, keys, values, sinks = heads
        setting = self._setting
        count, num_heads, _ = queries.shape
        if setting.cache_dtype is not None:
            keys, values = (x.to(setting.cache_dtype).float() for x in (keys, values))
        group = num_heads // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        window = self._spec.window(layer)
        blocks = [
            self._block(queries, keys, values, first, window, sinks)
            for first in range(0, count, _QUERIES)
        ]
        return self._round("attention", torch.cat(blocks)).flatten(1)

    def _block(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        first: int,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute attention for the block of queries from ``first`` on: [block, heads, dim]."""
        block = queries[first : first + _QUERIES]
        end = first + len(block)
        last = max([end, *(stop for start, stop in self._both_ways if start < end)])
        keys = keys[:last]
        values = values[:last]
        scores = torch.einsum("qhd,khd->hqk", block, keys) * block.shape[-1] ** -0.5
        scores = self._round("attention scores", scores)
        places = torch.arange(len(keys), device=scores.device)
        hidden = ~sees(places[first:end], places, window, self._both_ways)
        probabilities = softmax_with_sinks(
            scores.masked_fill(hidden, float("-inf")), None if sinks is None else sinks[:, None]
        )
        probabilities = self._round("attention scores", probabilities)
        return torch.einsum("hqk,khd->qhd", self._round("attention", probabilities), values)

    def _round(self, part: Part, x: Tensor) -> Tensor:
        return x.to(self._setting.dtype).float() if part in self._setting.rounded else x
