"""A micro-batch's distributions over the vocabulary, computed without the full logits.

Under context parallelism a rank has only the rows of its stripe; arguments and results cover all
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime.algorithms.divergence import (
    DivergenceKind,
    OutputRows,
    TopTokens,
    divergence,
    log_probs_at,
    top_tokens,
)
from slime.algorithms.logprobs import VocabShard
from slime.trainer.megatron.context import ContextSplit


@dataclass(frozen=True)
class BlockwiseVocabulary:
    """The rows that predict response tokens, and the output layer. See
    `slime.trainer.records.Vocabulary`.

    Attributes:
        rows: the rows of this rank's stripe, and the output weight.
        shard: the part of the vocabulary that this rank has.
        chunk_size: ``--log-probs-chunk-size``.
        grad_accumulator: gradient buffer of the output weight; None: autograd gets the gradient.
        context: how the tokens are split over ranks; None if one rank has all.
    """

    rows: OutputRows
    shard: VocabShard
    chunk_size: int
    grad_accumulator: Tensor | None
    context: ContextSplit | None

    def divergence(
        self, teachers: Sequence[tuple[Tensor, OutputRows]], kind: DivergenceKind, beta: float
    ) -> Tensor:
        """Return [N], the divergence of each token's distribution from its teacher's."""
        hidden = self.rows.hidden
        found = torch.zeros(hidden.size(0), device=hidden.device)
        for tokens, teacher in teachers:
            own, theirs = self._places(tokens)
            part = divergence(
                replace(self.rows, hidden=hidden.index_select(0, own)),
                replace(teacher, hidden=teacher.hidden.index_select(0, theirs)),
                kind,
                beta=beta,
                shard=self.shard,
                chunk_size=self.chunk_size,
                grad_accumulator=self.grad_accumulator,
            )
            found = found.to(part.dtype).index_copy(0, own, part)
        return self._whole(found)

    def _places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of this rank's rows in ``tokens``, and their indices there."""
        if self.context is None:
            return tokens, torch.arange(tokens.numel(), device=tokens.device)
        order = self.context.order[self.context.place.rank].to(tokens.device)
        at = torch.full((self.num_tokens,), -1, dtype=torch.long, device=tokens.device)
        at[tokens] = torch.arange(tokens.numel(), device=tokens.device)
        mine = at[order]
        own = (mine >= 0).nonzero()[:, 0]
        return own, mine[own]

    @property
    def num_tokens(self) -> int:
        """N, the number of rows over all ranks of the context group."""
        if self.context is None:
            return self.rows.hidden.size(0)
        return sum(order.numel() for order in self.context.order)

    def log_probs_at(self, ids: Tensor) -> Tensor:
        """Return the log-probs of the tokens ``ids`` [N, k], in the same shape."""
        found = log_probs_at(
            self.rows,
            ids if self.context is None else self.context.mine(ids),
            shard=self.shard,
            chunk_size=self.chunk_size,
            grad_accumulator=self.grad_accumulator,
        )
        return self._whole(found)

    def top_tokens(self, k: int) -> TopTokens:
        """Return the ``k`` most likely tokens of each row, [N, k], without gradient."""
        found = top_tokens(self.rows, k, shard=self.shard, chunk_size=self.chunk_size)
        return TopTokens(self._whole(found.ids), self._whole(found.log_probs))

    def whole_rows(self) -> OutputRows:
        """Return the rows of all tokens, without gradient."""
        hidden = self._whole(self.rows.hidden.detach())
        return replace(self.rows, hidden=hidden, weight=self.rows.weight.detach())

    def _whole(self, values: Tensor) -> Tensor:
        return values if self.context is None else self.context.whole(values)
