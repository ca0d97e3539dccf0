"""The products that adapters add to the base's, for batches whose rows have different adapters or
none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

#: Rows per product in deterministic mode: all products then have the same shape in every batch.
FIXED_ROWS = 32


@dataclass
class LowRank:
    """``scale · B A x``, an adapter's part of one `Linear`, or of the `TokenEmbedding`.

    Attributes:
        down: [k, in_features]: A, or the concatenated ones of a fused layer's parts. For the
            embedding, it has a column per token.
        up: [out_features, k]: B, zero outside its part's rows and columns.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def add_to(self, y: torch.Tensor, x: torch.Tensor, fixed_rows: bool) -> None:
        """Add the products of x [rows, in_features] to y [rows, out_features]."""
        if fixed_rows:
            y.add_(in_fixed_blocks(x, self._product), alpha=self.scale)
        else:
            y.addmm_(F.linear(x, self.down), self.up.t(), alpha=self.scale)

    def add_to_rows(
        self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, fixed_rows: bool
    ) -> None:
        """Add the products of the rows ``rows`` (int64) of x to the same rows of y."""
        chosen = x.index_select(0, rows)
        delta = in_fixed_blocks(chosen, self._product) if fixed_rows else self._product(chosen)
        y.index_add_(0, rows, delta, alpha=self.scale)

    def looked_up(self, token_ids: torch.Tensor, fixed_rows: bool) -> torch.Tensor:
        """Return the embedding's B A for tokens int64 [rows]: [rows, out_features]."""
        chosen = self.down.index_select(1, token_ids).t()
        multiply = partial(F.linear, weight=self.up)
        return in_fixed_blocks(chosen, multiply) if fixed_rows else multiply(chosen)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.down), self.up)


#: The products of one adapter, by `Linear`.
Products = Mapping[object, LowRank]

_ALL_ROWS = slice(None)


class AdaptedRows:
    """Maps the rows of a batch to their adapters' products.

    Args:
        groups: (products, their rows).
        owners: int64 [rows]: the group of each row, -1 for the base; None if all rows have one
            group.
    """

    def __init__(
        self, groups: list[tuple[Products, slice | torch.Tensor]], owners: torch.Tensor | None
    ) -> None:
        self._groups = groups
        self._owners = owners

    @staticmethod
    def of(
        products: Sequence[Products | None], counts: Sequence[int], device: torch.device
    ) -> AdaptedRows | None:
        """Map the rows of a batch in which each sequence has ``counts`` consecutive rows.

        Args:
            products: of each sequence's adapter; None for the base.
        Returns:
            None if all rows use only the base.
        """
        distinct = {id(item): item for item in products if item is not None}
        if not distinct:
            return None
        if len(distinct) == 1 and all(item is not None for item in products):
            return AdaptedRows([(next(iter(distinct.values())), _ALL_ROWS)], None)
        numbers = {key: number for number, key in enumerate(distinct)}
        owners = np.repeat([numbers.get(id(item), -1) for item in products], counts)
        groups: list[tuple[Products, slice | torch.Tensor]] = []
        for key, number in numbers.items():
            rows = np.flatnonzero(owners == number)
            first = int(rows[0])
            if rows[-1] - first == len(rows) - 1:
                groups.append((distinct[key], slice(first, first + len(rows))))
            else:
                groups.append((distinct[key], torch.from_numpy(rows).to(device)))
        return AdaptedRows(groups, torch.from_numpy(owners).to(device))

    def add(self, y: torch.Tensor, x: torch.Tensor, linear: object, fixed_rows: bool) -> None:
        """Add each row's product of ``linear`` to y [rows, out_features]; x [rows, in_features]."""
        for products, rows in self._groups:
            product = products.get(linear)
            if product is None:
                continue
            if isinstance(rows, slice):
                product.add_to(y[rows], x[rows], fixed_rows)
            else:
                product.add_to_rows(y, x, rows, fixed_rows)

    def add_looked_up(
        self, y: torch.Tensor, token_ids: torch.Tensor, embedding: object, fixed_rows: bool
    ) -> None:
        """Add each token's product of the embedding to y; ``token_ids`` are int64 [rows]."""
        for products, rows in self._groups:
            product = products.get(embedding)
            if product is None:
                continue
            added = product.looked_up(token_ids[rows], fixed_rows)
            if isinstance(rows, slice):
                y[rows].add_(added, alpha=product.scale)
            else:
                y.index_add_(0, rows, added, alpha=product.scale)

    def chosen(self, rows: torch.Tensor) -> AdaptedRows | None:
        """Return the map for a batch of these rows, int64 [rows]; None if all use only the base."""
        if self._owners is None:
            return self
        owners = self._owners[rows]
        groups: list[tuple[Products, slice | torch.Tensor]] = []
        for number, (products, _) in enumerate(self._groups):
            own = (owners == number).nonzero().squeeze(1)
            if len(own):
                groups.append((products, own))
        return AdaptedRows(groups, owners) if groups else None


def in_fixed_blocks(
    x: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Multiply x [rows, in] in blocks of `FIXED_ROWS` rows, the last one padded with zeros."""
    missing = -x.shape[0] % FIXED_ROWS
    padded = F.pad(x, (0, 0, 0, missing)) if missing else x
    blocks = [multiply(block) for block in padded.split(FIXED_ROWS)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[: x.shape[0]]
