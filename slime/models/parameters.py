"""Which tensors of a model are trained, stored and served, under their Hugging Face names.

    trained   the trainer's parameters are made of them, and `load_hf` must fill every one
    stored    a Hugging Face directory of plain weights holds them; the trainer reads and exports it
    served    a push brings them to the engines, which start from a directory that holds them

All three are the family's table when a plain model is trained as a whole. Engines of a quantised
model are served the parts of each quantised weight instead of the weight. With adapters the base is
stored and read once, by trainer and engines; trained and served are the adapters alone. Code that
needs one of the sets asks for it by name, so that the sets may differ in further ways.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.models.adapters import AdapterConfig, adapter_family
from slime.models.ignore_list import examine, matrices
from slime.models.quantised import Quantisation
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelParameters:
    """The three sets of one model.

    Args:
        quantisation: how the engines' weights are quantised; None for plain ones.
        adapters: what is trained in place of the model's own weights.
    """

    family: ModelFamily
    spec: ModelSpec
    quantisation: Quantisation | None = None
    adapters: AdapterConfig | None = None

    @property
    def trained(self) -> dict[str, Shape]:
        """Name → shape, in the order of the family's table."""
        return dict(self.trained_family.hf_tensors(self.spec))

    @property
    def trained_family(self) -> ModelFamily:
        """The table of what is trained."""
        if self.adapters is None:
            return self.family
        return adapter_family(self.family, self.spec, self.adapters)

    @property
    def stored(self) -> dict[str, Shape]:
        """Name → shape, in the order of the family's table."""
        return dict(self.family.hf_tensors(self.spec))

    @property
    def served(self) -> dict[str, tuple[str, Shape]]:
        """Name → (dtype, shape); the dtype "" is the model's own."""
        if self.adapters is not None:
            return {name: ("", shape) for name, shape in self.trained.items()}
        if self.quantisation is None:
            return {name: ("", shape) for name, shape in self.stored.items()}
        found = examine(matrices(self.family, self.spec), self.quantisation).quantised
        quantised = {matrix.weight: matrix for matrix in found}
        served: dict[str, tuple[str, Shape]] = {}
        for name, shape in self.stored.items():
            if name in quantised:
                parts = self.quantisation.scheme.parts(quantised[name].shape, "")
                served |= {
                    f"{quantised[name].module}.{part}": facts for part, facts in parts.items()
                }
            else:
                served[name] = ("", shape)
        return served
