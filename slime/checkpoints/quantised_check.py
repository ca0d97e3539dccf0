"""Verify a quantised Hugging Face directory: all shards, index entries and layers exist, and each
Linear layer is either quantised or ignored, according to config.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from slime.checkpoints.hf_files import HfReader
from slime.checkpoints.safetensors_stream import Table, read_table
from slime.engines.wire.buckets import SCALE_NAMES
from slime.errors import UserError, first_few
from slime.models import ModelFamily, ModelSpec
from slime.models.ignore_list import WeightMatrix, examine, matrices
from slime.models.parameters import ModelParameters
from slime.models.quantised import Quantisation

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def verify_quantised(
    directory: Path, family: ModelFamily, spec: ModelSpec, quantisation: Quantisation
) -> str:
    """Compare a directory with the tensors of its model in this format. Reads only headers.

    Returns:
        The text of `count_summary`.
    Raises:
        UserError: shards are missing or damaged, tensors are missing, unknown or of a wrong shape,
            a Linear layer is neither ignored nor quantised, or both, or a rule would make engines
            compute wrong numbers. Names are given.
    """
    reader = HfReader(directory, names_only=True)
    found = examine(matrices(family, spec), quantisation)
    present = merged(tables_of(reader))
    # no online quantiser is used: tensors stored unquantised are not quantised, despite the list
    wrong = replace(
        found, unspared=tuple(name for name in found.unspared if name not in present)
    ).problems()
    wrong += _wrongly_quantised(found.quantised, found.ignored, present, quantisation)
    expected = ModelParameters(family, spec, quantisation).served
    known = {name for name in present if family.is_ignored(name, spec)}
    wrong += _listed("missing", sorted(expected.keys() - present.keys()))
    wrong += _listed("unknown", sorted(present.keys() - expected.keys() - known))
    wrong += _listed("of another dtype or shape", list(_misshapen(expected, present, spec)))
    if wrong:
        raise UserError(
            f"{directory} is not a complete {family.name} model in {quantisation}",
            why="\n  ".join(wrong),
            fix="quantise it again (slime convert), or correct quantization_config in its "
            "config.json",
        )
    return count_summary(reader, spec)


def tables_of(reader: HfReader) -> dict[str, Table]:
    """Return the table of tensors of each weight file."""
    return {file: read_table(reader.directory / file) for file in reader.file_names}


def merged(tables: Mapping[str, Table]) -> Table:
    """Return one table of all files' tensors."""
    return {name: facts for table in tables.values() for name, facts in table.items()}


def count_summary(reader: HfReader, spec: ModelSpec) -> str:
    """Describe the numbers of files, of tensors, and of tensors per layer."""
    per_layer = Counter(
        int(found.group(1)) for name in reader.names() if (found := _LAYER.search(name))
    )
    counts = [per_layer[layer] for layer in range(spec.num_layers)]
    most = f" to {max(counts)}" if max(counts) > min(counts) else ""
    text = (
        f"{len(reader.file_names)} file(s), {len(reader.names())} tensors, {len(counts)} layers of "
        f"{min(counts)}{most} each"
    )
    first = next((layer for layer in range(spec.num_layers) if spec.is_moe_layer(layer)), None)
    if first is None:
        return text
    return f"{text}; layer {first}, the first with experts, has {counts[first]}"


def _wrongly_quantised(
    quantised: tuple[WeightMatrix, ...],
    ignored: tuple[WeightMatrix, ...],
    present: Table,
    quantisation: Quantisation,
) -> Iterator[str]:
    marks = [part for part in quantisation.scheme.parts((1, 1), "") if part != "weight"]
    plain = [
        one.module
        for one in quantised
        if one.weight in present and f"{one.module}.{marks[0]}" not in present
    ]
    both = [
        one.module for one in ignored if any(f"{one.module}.{mark}" in present for mark in marks)
    ]
    yield from _listed("Linear layers neither ignored nor quantised", plain)
    yield from _listed("Linear layers quantised although a rule ignores them", both)


def _misshapen(
    expected: Mapping[str, tuple[str, tuple[int, ...]]], present: Table, spec: ModelSpec
) -> Iterator[str]:
    for name, (dtype, shape) in expected.items():
        if name not in present:
            continue
        there, found = present[name]
        # these are padded and cut
        rows_of_vocabulary = shape and shape[0] == spec.vocab_size and found[1:] == shape[1:]
        one_number = found == () and shape == (1,)
        # scales are bfloat16 in some published models
        is_scale = name.endswith(SCALE_NAMES) and "float" in there
        if (dtype and there != dtype and not is_scale) or (
            found != shape and not rows_of_vocabulary and not one_number
        ):
            yield (
                f"{name} is {there} {list(found)} and would be {dtype or 'floating point'} "
                f"{list(shape)}"
            )


def _listed(kind: str, names: list[str]) -> list[str]:
    return [f"{len(names)} {kind}: {first_few(names)}"] if names else []
