"""The reference: the model in this process in float32, each part of which can be computed
differently.

Computation in 16 bits is imitated: products, norms and sums are computed in float32 and their
results rounded, as the kernels do. So each part can be rounded alone, which no dtype of a whole
model would allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
#: The parts that a run in 16 bits rounds.
IN_16_BITS: frozenset[Part] = frozenset(
    part for part in PARTS if part not in ("attention scores", "router")
)
#: Logits, and queries of attention, that exist at a time.
_ROWS = 256
_QUERIES = 512
#: End of the names of routers' weights.
_ROUTER = ".mlp.gate.weight"


@dataclass(frozen=True)
class Sampling:
    """How log-probs follow from logits: the temperature, and the filters applied before a token is
    drawn.

    Attributes:
        renormalised: log-probs are those of what the filters leave; else of all tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    renormalised: bool = False

    def log_probs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """float32 [rows, vocab], int64 [rows] → [rows]. A target that the filters drop keeps its
        own log-prob."""
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
        rounded: the parts whose results are rounded to ``dtype``.
        positions: (prompt length, length) → int64 [length]; None: 0, 1, 2, …
        rotary: fields of the `ModelSpec` to take in place of the model's own.
        experts: replays what the samples' engines chose.
        cache_dtype: keys and values are rounded to it.
        sight: how images are looked at.
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
    """Log-probs of samples by the model of a Hugging Face directory.

    Args:
        dtype: of the run, to which the weights are rounded. What is computed with them is not: each
            kernel rounds a little otherwise, so exact numbers are nearest to all of them.
        replays: the run's trainer takes the experts that the engine chose, and so does this model.
        images: prepares the samples' images; None: the run reads text alone.
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
            directory,
            self.arch,
            "float32",
            torch.device(device),
            longest,
            False,
        )
        for linear in self.store.linears:
            linear.packs = False  # products go through F.linear, where they can be rounded
        self.setting = ReferenceSettings(sampling=sampling, experts=replays)
        if dtype != torch.float32:
            self.write(
                {name: tensor.to(dtype).float() for name, tensor in self.store.named.items()}
            )

    @property
    def low_dtype(self) -> torch.dtype:
        """The dtype that "rounded" means: the run's, if that has 16 bits."""
        return torch.bfloat16 if self.dtype == torch.float32 else self.dtype

    def as_the_run(self) -> ReferenceSettings:
        """Return settings with the roundings of a run in 16 bits."""
        rounded = frozenset() if self.dtype == torch.float32 else IN_16_BITS
        return replace(self.setting, rounded=rounded, dtype=self.low_dtype)

    # -- weights -----------------------------------------------------------------------------------

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        self.store.update((name, tensor) for name, tensor in tensors.items())

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace weights of the reference within the block."""
        before = {name: self.store.named[name].clone() for name in tensors}
        self.write(tensors)
        try:
            yield
        finally:
            self.write(before)

    def matrices(self) -> dict[str, Tensor]:
        """Return the matrices that quantisation is applied to: those of layers except routers, by
        name."""
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
            context: the tokens before the response, in place of the sample's prompt.
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
        """Return the log-probs for several ways to make them from the same logits."""
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
        """Return the images of a sample whose prompt is ``context``; None if they have no places
        there."""
        vision = self.arch.spec.vision
        if vision is None or torch.equal(context, sample.tokens[: sample.prompt_length]):
            return sample.media
        return behind(sample.media, sample.prompt_length, context, vision)

    def _states(self, count: int) -> StateRows | None:
        """Storage for one sequence of ``count`` tokens; None for a model without gated delta
        nets."""
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
        """Return [L - 1, hidden] after the last norm; the last token predicts nothing."""
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
        turns = None
        images = None
        if self.images is not None:
            images = read_images(media, len(tokens), setting.sight.read or self.images.read)
        if images is not None:
            moved = setting.sight.positions_of(images, count) + positions - torch.arange(count)
            turns = moved.clamp(min=0)
        needed = int((positions if turns is None else turns).max()) + 1
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
        try:
            with _Rounding(setting, self.arch.spec.num_experts):
                attend = _Attention(setting, self.arch.spec, self._states(count))
                seen = None
                if images is not None:
                    tower = self.store.tower
                    assert tower is not None
                    width = self.arch.hidden_size
                    seen = setting.sight.see(tower, images, count, width)
                return model.forward(
                    tokens[:-1].to(device),
                    positions.to(device),
                    attend,
                    watcher.chosen,
                    watcher,
                    turns=None if turns is None else turns.to(device),
                    seen=seen,
                )
        finally:
            model.angles = before


@dataclass
class Watcher:
    """An `Observer` that records what it sees.

    Attributes:
        seen: part → [tokens, hidden], where ``keeps``.
        chosen: experts of each layer that has some.
        replayed: layer → choices to take.
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
    """Layer → int64 [count, k], -1 where it is not known."""
    assert arch.experts is not None
    whole = torch.full((count, arch.spec.num_layers, arch.experts.chosen), -1, dtype=torch.int64)
    known = experts.reshape(-1, arch.spec.num_layers, arch.experts.chosen)[:count].to(torch.int64)
    whole[: len(known)] = known
    whole = whole.to(device)
    return {layer: whole[:, layer] for layer, has in enumerate(arch.experts.in_layer) if has}


def _penalised(logits: Tensor, tokens: Tensor, first: int, sampling: Sampling) -> Tensor:
    """Apply the repetition penalty for the tokens before each row; row 0 predicts token
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
    """Rounds the results of parts of a forward pass, told apart by the function that computes
    them."""

    def __init__(self, setting: ReferenceSettings, num_experts: int) -> None:
        super().__init__()
        parts: dict[Any, Part] = {F.rms_norm: "norms", F.linear: "products", F.silu: "activation"}
        parts |= {  # the first two: a vision tower's
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
    """Causal attention of one sequence, without a cache.

    Attributes:
        states: of gated delta nets, which begin with nothing.
    """

    def __init__(
        self, setting: ReferenceSettings, spec: ModelSpec, states: StateRows | None
    ) -> None:
        self._setting = setting
        self._spec = spec
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
        """Attend from the queries ``first`` onwards: [block, heads, dim]."""
        block = queries[first : first + _QUERIES]
        last = first + len(block)
        scores = torch.einsum("qhd,khd->hqk", block, keys[:last]) * block.shape[-1] ** -0.5
        scores = self._round("attention scores", scores)
        places = torch.arange(last, device=scores.device)
        hidden = ~sees(places[first:], places, window)
        probabilities = softmax_with_sinks(
            scores.masked_fill(hidden, float("-inf")), None if sinks is None else sinks[:, None]
        )
        probabilities = self._round("attention scores", probabilities)
        return torch.einsum("hqk,khd->qhd", self._round("attention", probabilities), values[:last])

    def _round(self, part: Part, x: Tensor) -> Tensor:
        return x.to(self._setting.dtype).float() if part in self._setting.rounded else x
