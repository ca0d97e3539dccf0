"""Converts Hugging Face directories between unquantised and quantised weights, shard by shard.

    quantise_directory(plain, target, quantisation)     bfloat16 ─► INT4 or FP8
    store_in_mxfp4(plain, target)                       bfloat16 ─► MXFP4, stacked experts only
    dequantise_directory(quantised, target, dtype)      FP8, INT4 or MXFP4 ─► bfloat16

Each shard of the source becomes one of the target with the same name, and is flushed to the disk
before the next one begins: a killed conversion resumes with the first missing shard. Memory holds
one weight and its converted form. The target appears under its final name once all of it has been
verified (`slime.checkpoints.quantised_check`).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slime.checkpoints.directory import partial_dir, partial_path, publish
from slime.checkpoints.hf_files import INDEX, SINGLE, HfReader, check_export, copy_assets
from slime.checkpoints.mxfp4 import BLOCK, BLOCKS, SCALES, base_names, decode, encode
from slime.checkpoints.quantised_check import count_summary, merged, tables_of, verify_quantised
from slime.checkpoints.safetensors_stream import Table, read_table, write_stream
from slime.engines.wire.buckets import dtype_name, dtype_of
from slime.engines.wire.quantised import config_of, dequantise, quantise
from slime.errors import UserError
from slime.files import write_atomically
from slime.log import get_logger
from slime.models import family_of, read_hf_config
from slime.models.ignore_list import (
    WeightMatrix,
    examine,
    idle_among,
    matrices,
    refuse_stacks,
    refuse_untried,
)
from slime.models.layouts import Transposed
from slime.models.parameters import ModelParameters
from slime.models.quantised import MXFP4, NIBBLES, Quantisation, is_mxfp4
from slime.models.table import shapes_of

logger = get_logger(__name__)

_PLAN = "plan.json"


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        directory: where the model is.
        files, kept: number of weight files, and of those that an earlier attempt had finished.
        tensors: number of tensors in all files.
        nbytes: total size of the files.
        quantised: number of weights of Linear layers that were converted.
        counts: the verification's summary of the layers.
    """

    directory: Path
    files: int
    kept: int
    tensors: int
    nbytes: int
    quantised: int
    counts: str

    def __str__(self) -> str:
        kept = f", {self.kept} of them from an earlier attempt" if self.kept else ""
        return (
            f"wrote {self.directory}: {self.quantised} weights converted, {self.tensors} tensors,"
            f" {self.nbytes / 1e9:.2f} GB in {self.files} file(s){kept}\nverified: {self.counts}"
        )


def plain_weights(
    source: Path, model_name: str | None = None
) -> tuple[dict[str, Table], list[WeightMatrix]]:
    """Return the tables of a directory's files, and its two-dimensional weights.

    Raises:
        UserError: the directory is not a complete model with unquantised weights.
    """
    _refuse_quantised(source)
    family = family_of(source, model_name)
    spec = family.describe(source)
    reader = HfReader(source, names_only=True)
    surplus = set(reader.verify(family, spec))
    tables = tables_of(reader)
    extra = [(name, shape) for name, (_, shape) in merged(tables).items() if name in surplus]
    return tables, matrices(family, spec, extra)


def quantise_directory(
    source: Path, target: Path, quantisation: Quantisation, model_name: str | None = None
) -> Converted:
    """Write ``source`` with the weights of its Linear layers quantised, except those that a rule
    ignores.

    Raises:
        UserError: the source is incomplete or quantised, the rules do not fit the model, nothing
            would be quantised, ``target`` holds something else, or a weight is not finite.
    """
    tables, weights = plain_weights(source, model_name)
    family = family_of(source, model_name)
    refuse_stacks(family, quantisation.method)
    refuse_untried(family, quantisation.method)
    found = examine(weights, quantisation)
    problems = found.problems()
    if problems:
        raise UserError(
            f"{source} cannot be quantised with these rules",
            why="\n  ".join(problems),
            fix=f"correct --ignore: {_RULES}",
        )
    if not found.quantised:
        raise UserError(
            f"nothing of {source} would be quantised", why="--ignore names every Linear layer"
        )
    for rule in idle_among(found, merged(tables)):
        logger.warning("the rule %r of --ignore names nothing in %s", rule, source)
    # engines match these patterns differently; full names mean the same to all of them
    if quantisation.method == "fp8":
        converted = {weight.module for weight in found.quantised}
        modules = tuple(weight.module for weight in weights if weight.module not in converted)
        quantisation = Quantisation(quantisation.method, quantisation.scheme, modules)
    chosen = {weight.weight: weight for weight in found.quantised}

    def task_of(name: str, dtype: str, shape: tuple[int, ...]) -> _Task:
        if name not in chosen:
            return _Task((name,), {name: (dtype, shape)})
        module = chosen[name].module
        parts = quantisation.scheme.parts(chosen[name].shape, dtype)
        return _Task((name,), {f"{module}.{part}": facts for part, facts in parts.items()}, module)

    def convert(task: _Task, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        (weight,) = stored.values()
        _check_finite(task, weight, source)
        return quantise(task.module, weight, quantisation.scheme)

    settings = {"quantised": str(quantisation), "ignore": quantisation.ignore}
    conversion = _Conversion(source, target, tables, _plan_of(tables, task_of), convert, settings)
    return conversion.run({"quantization_config": config_of(quantisation)}, None, model_name)


def dequantise_directory(
    source: Path, target: Path, dtype: torch.dtype = torch.bfloat16, model_name: str | None = None
) -> Converted:
    """Write a quantised model with unquantised weights of ``dtype``.

    Raises:
        UserError: the source is incomplete, or not quantised by a supported method.
    """
    config = read_hf_config(source)
    if is_mxfp4(config):
        return _decode_mxfp4(source, target, dtype, model_name)
    settings = config.get("quantization_config")
    if isinstance(settings, Mapping) and settings.get("scale_fmt") == "ue8m0":
        # engines round scales to powers of two; those in the files are such numbers already
        config["quantization_config"] = {**settings, "scale_fmt": "float"}
    quantisation = Quantisation.read(config)
    if quantisation is None:
        raise UserError(
            f"{source} has plain weights already", why="config.json has no quantization_config"
        )
    family = family_of(config, model_name)
    spec = family.describe(config)
    verify_quantised(source, family, spec, quantisation)
    tables = tables_of(HfReader(source, names_only=True))
    present = merged(tables)
    shapes = ModelParameters(family, spec).stored
    plan = {
        file: list(_plain_tasks(table, present, shapes, quantisation, dtype))
        for file, table in tables.items()
    }

    def convert(task: _Task, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {
            f"{task.module}.weight": dequantise(task.module, stored, quantisation.scheme, dtype)
        }

    conversion = _Conversion(
        source, target, tables, plan, convert, {"dequantised": dtype_name(dtype)}
    )
    return conversion.run({"quantization_config": None}, dtype_name(dtype), model_name)


def store_in_mxfp4(source: Path, target: Path, model_name: str | None = None) -> Converted:
    """Write ``source`` with its stacked experts in MXFP4, as gpt-oss is published.

    Raises:
        UserError: the source is incomplete or quantised, it has no stacks that are stored as
            [in, out], their input is not a multiple of 32, or a weight is not finite.
    """
    tables, _ = plain_weights(source, model_name)
    family = family_of(source, model_name)
    rules = [
        rule
        for rule in family.rules
        if rule.is_stacked and isinstance(rule.layout, Transposed) and rule.columns is not None
    ]
    if not rules:
        raise UserError(
            f"{source} is of the family {family.name}, which is not stored in MXFP4",
            why="the form is that of stacks of experts [experts, in, out]",
            fix="slime convert hf-to-int4 and hf-to-fp8 quantise other models",
        )
    spec = family.describe(source)
    wide = [shapes_of(rule, spec)[0][0] for rule in rules]
    if any(columns % BLOCK for columns in wide):
        raise UserError(
            f"{source} cannot be stored in MXFP4",
            why=f"its experts have inputs of {' and '.join(map(str, wide))}; {BLOCK} numbers share "
            "a scale",
        )

    def task_of(name: str, dtype: str, shape: tuple[int, ...]) -> _Task:
        found = family.match_hf(name)
        if found is None or found[0] not in rules:
            return _Task((name,), {name: (dtype, shape)})
        experts, columns, rows = shape
        count = columns // BLOCK
        parts = {
            name + BLOCKS: ("uint8", (experts, rows, count, BLOCK // 2)),
            name + SCALES: ("uint8", (experts, rows, count)),
        }
        return _Task((name,), parts, name)

    def convert(task: _Task, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        (weight,) = stored.values()
        _check_finite(task, weight, source)
        parts = [encode(expert.t()) for expert in weight]
        return {
            name: torch.stack(tensors)
            for name, tensors in zip(task.results, zip(*parts, strict=True), strict=True)
        }

    plan = _plan_of(tables, task_of)
    conversion = _Conversion(source, target, tables, plan, convert, {"quantised": MXFP4})
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    config = {
        "quant_method": MXFP4,
        "modules_to_not_convert": [*spared, "model.embed_tokens", "lm_head"],
    }
    return conversion.run({"quantization_config": config}, None, model_name)


def _decode_mxfp4(
    source: Path, target: Path, dtype: torch.dtype, model_name: str | None
) -> Converted:
    """Write a model that is stored in MXFP4 with unquantised weights."""
    family = family_of(source, model_name)
    reader = HfReader(source, names_only=True)
    reader.verify(family, family.describe(source))
    tables = tables_of(reader)
    stacks = base_names(list(merged(tables)))
    by_blocks = {blocks: (stem, scales) for stem, (blocks, scales) in stacks.items()}
    scales = {name for _, name in stacks.values()}

    def task_of(name: str, kind: str, shape: tuple[int, ...]) -> _Task:
        if name not in by_blocks:
            return _Task((name,), {name: (kind, shape)})
        stem, own = by_blocks[name]
        experts, rows, count, _ = shape
        return _Task((name, own), {stem: (dtype_name(dtype), (experts, count * BLOCK, rows))}, stem)

    def convert(task: _Task, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        blocks, own = (stored[name] for name in task.sources)
        return {task.module: decode(blocks, own, dtype).transpose(1, 2).contiguous()}

    plan = _plan_of(tables, task_of, without=scales)
    conversion = _Conversion(
        source, target, tables, plan, convert, {"dequantised": dtype_name(dtype)}
    )
    return conversion.run({"quantization_config": None}, dtype_name(dtype), model_name)


#: How to write a list of rules, for messages.
_RULES = (
    r"names of modules, or expressions such as 're:.*mlp\.gate\..*'; without --ignore the "
    r"recommended list is taken"
)


def _plain_tasks(
    table: Table,
    present: Table,
    shapes: Mapping[str, tuple[int, ...]],
    quantisation: Quantisation,
    dtype: torch.dtype,
) -> Iterator[_Task]:
    scheme = quantisation.scheme
    names = list(scheme.parts((1, 1), ""))
    for name in sorted(table):
        module = quantisation.module(name)
        parts = tuple(f"{module}.{part}" for part in names)
        if module is None or not all(part in present for part in parts):
            yield _Task((name,), {name: table[name]})
        elif name == parts[0]:  # the quantised numbers; the other parts may be in another file
            weight = f"{module}.weight"
            shape = shapes.get(weight) or _shape_of(table[name])
            yield _Task(parts, {weight: (dtype_name(dtype), shape)}, module)


def _shape_of(facts: tuple[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Derive the shape of a weight that the family's table lacks from that of its quantised
    numbers."""
    dtype, shape = facts
    return (shape[0], shape[1] * NIBBLES) if dtype == "int32" else shape


def _refuse_quantised(source: Path) -> None:
    if read_hf_config(source).get("quantization_config"):
        raise UserError(
            f"{source} is quantised already",
            why="config.json has a quantization_config",
            fix="slime convert quantised-to-hf makes plain weights of it",
        )


def _check_finite(task: _Task, weight: torch.Tensor, source: Path) -> None:
    if not torch.isfinite(weight).all():
        raise UserError(
            f"{task.sources[0]} of {source} has NaN or infinite numbers",
            why="quantised they would become scales that make others NaN, or other numbers, and no "
            "reader would notice",
            fix="take a checkpoint from before the training that made it went wrong",
        )


def _plan_of(
    tables: Mapping[str, Table],
    task_of: Callable[[str, str, tuple[int, ...]], _Task],
    without: Container[str] = (),
) -> dict[str, list[_Task]]:
    """Return the tasks of each file: ``task_of`` each tensor (name, dtype, shape), in order of
    names."""
    return {
        file: [task_of(name, *table[name]) for name in sorted(table) if name not in without]
        for file, table in tables.items()
    }


# -- one conversion --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """A tensor to copy, or a module (``module`` is not "") whose weight is to be converted.

    Attributes:
        sources: names of the tensors to read.
        results: names, dtypes and shapes of the tensors to write.
    """

    sources: tuple[str, ...]
    results: Table
    module: str = ""


@dataclass(frozen=True)
class _Conversion:
    """The conversion of a directory to or from quantised weights, file by file.

    Attributes:
        tables: of the source's files.
        plan: weight file → the tasks whose results it holds, in order.
        convert: converts a module's stored tensors.
        settings: identify the conversion, so that an earlier attempt at it can be resumed.
    """

    source: Path
    target: Path
    tables: Mapping[str, Table]
    plan: Mapping[str, list[_Task]]
    convert: Callable[[_Task, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    settings: Mapping[str, Any]

    @functools.cached_property
    def results(self) -> dict[str, Table]:
        """Tables of the files to write; a file of the source may have no results."""
        return {
            file: {name: facts for task in tasks for name, facts in task.results.items()}
            for file, tasks in self.plan.items()
            if tasks
        }

    def run(
        self, config: Mapping[str, Any], dtype: str | None, model_name: str | None
    ) -> Converted:
        """Convert what an earlier attempt has left, and publish the directory.

        Args:
            config: changes to config.json; None removes a key.
            dtype: the dtype of the weights to state in config.json; None leaves it unchanged.
        """
        check_export(self.target, {"--hf_model_path": self.source})
        partial, kept = self._begin()
        where = {name: file for file, table in self.results.items() for name in table}
        files = list(self.results)
        for number, (file, table) in enumerate(self.results.items(), start=1):
            if file not in kept:
                logger.info("file %d of %d: %s", number, len(files), file)
                write_stream(partial / file, table, self._tensors(self.plan[file]))
        if files != [SINGLE]:
            index = {
                "metadata": {"total_size": _size(self.results)},
                "weight_map": dict(sorted(where.items())),
            }
            write_atomically(
                partial / INDEX, (json.dumps(index, indent=2) + "\n").encode(), durable=True
            )
        copy_assets(self.source, partial, dtype)
        _change_config(partial / "config.json", config)
        counts = self._verify(partial, model_name)
        (partial / _PLAN).unlink()
        publish(partial, self.target)
        nbytes = sum((self.target / file).stat().st_size for file in files)
        converted = sum(bool(task.module) for tasks in self.plan.values() for task in tasks)
        return Converted(
            directory=self.target,
            files=len(files),
            kept=len(kept),
            tensors=len(where),
            nbytes=nbytes,
            quantised=converted,
            counts=counts,
        )

    def _begin(self) -> tuple[Path, set[str]]:
        """Return the directory to write into, and the complete files in it of an earlier attempt at
        the same conversion."""
        stats = {file: (self.source / file).stat() for file in self.plan}
        sizes = {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}
        words = {"source": str(self.source.resolve()), "files": sizes, **self.settings}
        plan = (json.dumps(words, indent=1, default=list) + "\n").encode()
        partial = partial_path(self.target)
        if not (partial / _PLAN).is_file() or (partial / _PLAN).read_bytes() != plan:
            partial_dir(self.target)
            write_atomically(partial / _PLAN, plan, durable=True)
        for unfinished in partial.glob(".*.tmp"):
            unfinished.unlink()
        return partial, {
            file for file, table in self.results.items() if _is_whole(partial / file, table)
        }

    def _tensors(self, tasks: Iterable[_Task]) -> Iterator[tuple[str, torch.Tensor]]:
        file_of = {name: file for file, table in self.tables.items() for name in table}
        with ExitStack() as stack:
            opened: dict[str, Any] = {}

            def read(name: str) -> torch.Tensor:
                file = file_of[name]
                if file not in opened:
                    opened[file] = stack.enter_context(
                        safe_open(self.source / file, framework="pt")
                    )
                tensor: torch.Tensor = opened[file].get_tensor(name)
                return tensor

            for task in tasks:
                stored = {name: read(name) for name in task.sources}
                yield from (self.convert(task, stored) if task.module else stored).items()

    def _verify(self, partial: Path, model_name: str | None) -> str:
        """Check the written files, index and headers against the plan, and the model for
        completeness."""
        for file, table in self.results.items():
            if not _is_whole(partial / file, table):
                raise UserError(
                    f"{partial / file} is not as it was written", fix="start the conversion again"
                )
        config = read_hf_config(partial)
        family = family_of(config, model_name)
        spec = family.describe(config)
        quantisation = Quantisation.read(config)
        if quantisation is not None:
            return verify_quantised(partial, family, spec, quantisation)
        reader = HfReader(partial, names_only=True)
        reader.verify(family, spec)
        return count_summary(reader, spec)


def _is_whole(path: Path, table: Table) -> bool:
    try:
        return path.is_file() and read_table(path) == table
    except (SafetensorError, OSError):
        return False


def _size(tables: Mapping[str, Table]) -> int:
    return sum(
        math.prod(shape) * dtype_of(dtype).itemsize for dtype, shape in merged(tables).values()
    )


def _change_config(path: Path, changes: Mapping[str, Any]) -> None:
    config = {**json.loads(path.read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None or key not in changes}
    write_atomically(path, (json.dumps(kept, indent=2) + "\n").encode())
