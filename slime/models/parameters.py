"""The tensors of a model that are trained, stored and served, by their Hugging Face names.

    trained   make up the trainer's parameters; `load_hf` must fill all of them
    stored    contents of an unquantised Hugging Face directory, which the trainer reads and exports
    served    pushed to the engines, which start from a directory with these tensors

All three are the family's table when an unquantised model is fully trained. Engines of a quantised
model are served the parts of each quantised weight instead of the weight. With adapters, trainer
and engines read the stored base once, and only the adapters are trained and served.
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
    """The trained, stored and served tensors of one model.

    Args:
        quantisation: how the engines' weights are quantised; None: not quantised.
        adapters: the adapters that are trained instead of the model's weights.
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
        """The table of trained parameters."""
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
