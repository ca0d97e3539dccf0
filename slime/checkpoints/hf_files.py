"""Hugging Face checkpoint directories: verified reading by slices, atomic sharded writing.

    HfReader(dir).verify(family, spec)   checks shards, index and layers before anything is loaded
    reader["model.norm.weight"][0:16]    reads these bytes only
    with HfWriter(dir, assets_from) as out: out.add(name, tensor)

torch is imported only where tensors are read or written.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from slime.checkpoints.directory import partial_dir, publish
from slime.checkpoints.expert_layouts import StackLayout, stack_layouts
from slime.checkpoints.mxfp4 import Mxfp4Tensor, base_names
from slime.errors import UserError, contents_of, first_few
from slime.models import ModelFamily, ModelSpec
from slime.models.hybrid import write_interval
from slime.models.layouts import TensorSource
from slime.models.parameters import ModelParameters

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
#: The head of a reward model, [1, H].
SCORE = "score.weight"
SINGLE = "model.safetensors"
#: Suffixes of tensors of quantised checkpoints → format.
_QUANTISED = {
    ".weight_scale_inv": "FP8",
    ".weight_scale": "FP8 or INT8",
    ".weight_packed": "INT4",
    ".qweight": "INT4",
}
#: The folder in which transformers stores chat templates besides the default one.
_NAMED_TEMPLATES = "additional_chat_templates"
#: Endings of names of files that are no assets of a model: weights, and their index.
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json",
)  # fmt: skip


class LazyTensor:
    """A tensor in a safetensors file; indexing (`[a:b]`, `[:, a:b]`, `[:]`) reads only the needed
    bytes."""

    def __init__(self, piece: Any) -> None:
        self._piece = piece
        self.shape: tuple[int, ...] = tuple(piece.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._piece[index]


def open_safetensors(path: Path, framework: str = "pt") -> Any:
    """Open a safetensors file.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a readable safetensors file",
            why=f"{error} (it has {path.stat().st_size} bytes)",
            fix="download it again: the download was incomplete, or the file is a Git LFS pointer",
        ) from error


class HfReader:
    """The tensors of a Hugging Face directory, one file or several with an index.

    Opening checks that the files exist and agree with the index. It reads only headers.

    Args:
        names_only: no tensor will be read, so torch is not imported.
        as_trunk: only the layers are needed, so the model may be a sequence classifier.
    Raises:
        UserError: there are no safetensors, shards are missing or damaged, or no shard has an entry
            of the index.
    """

    def __init__(
        self, directory: str | Path, *, names_only: bool = False, as_trunk: bool = False
    ) -> None:
        self.directory = Path(directory)
        self._as_trunk = as_trunk
        self._framework = "np" if names_only else "pt"
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for file_name, expected in self._expected_files().items():
            self._files[file_name] = open_safetensors(self.directory / file_name, self._framework)
            names = set(self._files[file_name].keys())
            if expected is not None and expected - names:
                missing = sorted(expected - names)
                raise UserError(
                    f"{self.directory / file_name} lacks {len(missing)} tensors that the index "
                    "lists",
                    why=f"the first: {', '.join(missing[:3])}",
                    fix=f"download {file_name} and {INDEX} again from the same revision",
                )
            own = names if expected is None else expected
            self._file_of.update(dict.fromkeys(own, file_name))  # the index decides
            for name in names - own:
                self._file_of.setdefault(name, file_name)
        self._mxfp4 = base_names(sorted(self._file_of))
        self._stored_names: dict[str, str] = {}
        self._stacks: dict[str, StackLayout] = {}
        self._open_stacks: dict[str, TensorSource] = {}

    def names(self) -> set[str]:
        """Return the names of the tensors. Stacks stored in MXFP4 or one expert at a time have the
        names of unquantised, stacked tensors."""
        parts = {part for pair in self._mxfp4.values() for part in pair}
        parts.update(part for layout in self._stacks.values() for part in layout.names)
        whole = {name for name in self._stacks if not self._absent(name)}
        return (set(self._file_of) - parts) | set(self._mxfp4) | whole

    def file_of(self, name: str) -> str:
        """Return the file that holds a tensor, or its first piece."""
        if name in self._mxfp4:
            return self._file_of[self._mxfp4[name][0]]
        layout = self._stacks.get(name)
        return self._file_of[layout.names[0] if layout and layout.pieces else name]

    def arrange(self, family: ModelFamily, spec: ModelSpec) -> bool:
        """Read the tower's tensors by the names, and stacks of experts in the layout, of published
        checkpoints from now on. Return whether the directory has another layout of stacks."""
        if family.other_names is not None and spec.vision is not None:
            for name in list(self._file_of):
                published = re.sub(f"^{family.other_names[0]}", family.other_names[1], name)
                if published != name:
                    self._file_of[published] = self._file_of.pop(name)
                    self._stored_names[published] = name
        if family.stacks_experts:
            stored = set(self._file_of)
            shape_of = lambda name: self._stored(name).shape  # noqa: E731
            self._stacks = stack_layouts(family, spec, stored, shape_of)
        return bool(self._stacks)

    @property
    def has_transposed_stacks(self) -> bool:
        """Tell whether stacks of experts are transposed, compared with published ones."""
        return any(one.is_transposed and not one.pieces for one in self._stacks.values())

    def _absent(self, name: str) -> list[str]:
        """Return the missing stored tensors of a tensor."""
        layout = self._stacks.get(name)
        stored = layout.names if layout and layout.pieces else [name]
        return [one for one in stored if one not in self._file_of]

    @property
    def file_names(self) -> list[str]:
        """Names of the weight files."""
        return sorted(self._files)

    def dtype_of(self, name: str) -> str:
        """Return torch's name of a tensor's dtype, without reading the tensor."""
        from slime.checkpoints.safetensors_stream import DTYPE_NAMES

        return DTYPE_NAMES[self._slice(name).get_dtype()]

    def __getitem__(self, name: str) -> TensorSource:
        if name in self._mxfp4:
            return Mxfp4Tensor(*(self._stored(part) for part in self._mxfp4[name]))
        if name in self._stacks:
            if name not in self._open_stacks:
                self._open_stacks[name] = self._stacks[name].open(name, self._stored)
            return self._open_stacks[name]
        return self._stored(name)

    def _stored(self, name: str) -> LazyTensor:
        return LazyTensor(self._slice(name))

    def _slice(self, name: str) -> Any:
        """Return safetensors' handle of a stored tensor: its dtype, shape and rows."""
        return self._files[self._file_of[name]].get_slice(self._stored_names.get(name, name))

    @property
    def score(self) -> LazyTensor | None:
        """The head [1, H] of a sequence classifier that is read as a trunk."""
        return self._stored(SCORE) if self._as_trunk and SCORE in self._file_of else None

    def verify(self, family: ModelFamily, spec: ModelSpec) -> list[str]:
        """Compare the tensors with those of the family's table.

        Returns:
            Tensors that exist and are known to be unused.
        Raises:
            UserError: tensors are missing or unknown (named by layer), or do not have the shape
                that follows from config.json.
        """
        self.arrange(family, spec)
        shapes = ModelParameters(family, spec).stored
        present = self.names()
        if self._as_trunk and SCORE in present:
            present.remove(SCORE)
            output = family.match_megatron("output_layer.weight", spec)
            unused = set() if output is None or spec.tie_embeddings else set(output.sources)
            shapes = {name: shape for name, shape in shapes.items() if name not in unused}
        expected = set(shapes)
        surplus = present - expected
        ignored = sorted(name for name in surplus if family.is_ignored(name, spec))
        unknown = sorted(surplus - set(ignored))
        missing = sorted(part for name in expected - present for part in self._absent(name))
        quantised = next((name for name in unknown if name.endswith(tuple(_QUANTISED))), None)
        if quantised is not None:
            kind = next(kind for suffix, kind in _QUANTISED.items() if quantised.endswith(suffix))
            raise UserError(
                f"{self.directory} holds weights quantised to {kind}",
                why=f"it has {quantised}; training needs unquantised weights",
                fix="use a bfloat16 copy of the model (slime convert quantised-to-hf makes one of "
                "FP8 and INT4); to quantise only the engines, pass the copy with --ref-load; or "
                "train adapters of these weights with --lora-rank",
            )
        if missing or unknown:
            raise UserError(
                f"{self.directory} is not a complete {family.name} model",
                why="; ".join(
                    _describe(missing, "missing", spec) + _describe(unknown, "unknown", spec)
                ),
                fix=_fix_of(missing, unknown),
            )
        self._check_shapes(shapes, family, spec)
        self._check_dtypes(shapes)
        if spec.tie_embeddings:
            self._check_tied()
        return ignored

    def _check_dtypes(self, names: Iterable[str]) -> None:
        """Refuse weights that are not floating-point numbers of at least 16 bits."""
        for name in names:
            if name not in self._file_of or name in self._mxfp4:
                continue
            code = self._slice(name).get_dtype()
            if code not in ("F64", "F32", "F16", "BF16"):
                raise UserError(
                    f"{self.directory}: {name} is of the type {code}, which is no type of "
                    "unquantised weights",
                    why="without scales its numbers are not the model's",
                    fix="use a bfloat16 copy of the model",
                )

    def _check_tied(self) -> None:
        """Refuse an output layer that differs from the embedding where config.json ties both.

        Compares the first and the last rows.
        """
        ends = ("embed_tokens.weight", "lm_head.weight")
        found = [sorted((n for n in self._file_of if n.endswith(end)), key=len) for end in ends]
        if not all(found) or self._framework == "np" or self._as_trunk:
            return
        embedding = found[0][0]
        output = found[1][0]
        pair = self._stored(embedding), self._stored(output)
        if pair[0].shape == pair[1].shape:
            parts = (slice(0, 64), slice(-64, None))
            if all(bool((pair[0][part] == pair[1][part]).all()) for part in parts):
                return
        raise UserError(
            f"{self.directory}: {output} differs from the embedding, and config.json has "
            "tie_word_embeddings true",
            why="with tied weights the output layer of the file would not be used",
            fix="set tie_word_embeddings to false in config.json if the model has an output layer "
            f"of its own; else remove {output} from the file",
        )

    def _check_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], family: ModelFamily, spec: ModelSpec
    ) -> None:
        """Refuse wrong shapes. Embeddings may have any number of rows: they are padded and cut."""
        wrong = []
        for name, shape in shapes.items():
            found = tuple(self[name].shape)
            if found != shape and not (shape[0] == spec.vocab_size and found[1:] == shape[1:]):
                wrong.append(f"{name} is {list(found)} and would be {list(shape)}")
        if wrong:
            raise UserError(
                f"{self.directory}: {len(wrong)} of {len(shapes)} weights are not of the shape "
                f"that config.json gives a {family.name} model",
                why="; ".join(wrong[:3]),
                fix="config.json was edited, or belongs to another model: download both from the "
                "same revision",
            )

    def _expected_files(self) -> dict[str, set[str] | None]:
        """Return file name → tensors that the index lists for it; None without an index."""
        index = self.directory / INDEX
        if not index.is_file():
            if (self.directory / SINGLE).is_file():
                return {SINGLE: None}
            raise self._no_weights()
        try:
            weight_map: dict[str, Any] = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{index} is damaged", why=str(error), fix="download it again"
            ) from error
        # conversions write files with these names
        outside = [
            name
            for name in weight_map.values()
            if not isinstance(name, str) or Path(name).name != name
        ]
        if outside:
            why = f"its weight_map names {outside[0]!r}, which is not a file of this directory"
            raise UserError(
                f"{index} is damaged",
                why=why,
                fix="download the index again from a source that you trust",
            )
        promised: dict[str, set[str] | None] = {}
        for name, file_name in weight_map.items():
            entry = promised.setdefault(file_name, set())
            assert entry is not None
            entry.add(name)
        absent = [name for name in sorted(promised) if not (self.directory / name).is_file()]
        if absent:
            layers = _layers_of(name for file_name in absent for name in promised[file_name] or ())
            raise UserError(
                f"{len(absent)} of {len(promised)} shards are missing in {self.directory}",
                why=first_few(absent, 6)
                + (f"; they hold tensors of the layers {layers}" if layers else ""),
                fix="download them again: the download was incomplete",
            )
        if SINGLE not in weight_map.values() and (self.directory / SINGLE).is_file():
            raise UserError(
                f"{self.directory} has weights twice",
                why=f"{SINGLE} is beside {INDEX}, which does not name it; some readers take one, "
                "some the other",
                fix="remove the one that is not meant",
            )
        return dict(sorted(promised.items()))

    def _no_weights(self) -> UserError:
        if not self.directory.is_dir():
            return UserError(
                f"there is no directory {self.directory}",
                fix="name a Hugging Face model directory of this host",
            )
        if any(self.directory.glob("*.bin")):
            return UserError(
                f"{self.directory} holds PyTorch .bin weights",
                why="pickled files run code when they are read and cannot be read by slices",
                fix="convert once: "
                "AutoModelForCausalLM.from_pretrained(dir).save_pretrained(new_dir), and use "
                "new_dir",
            )
        if any(self.directory.glob("*.gguf")):
            fix = (
                "convert once: slime convert gguf-to-hf, then use the new directory instead of "
                f"{self.directory}"
            )
            return UserError(f"{self.directory} holds GGUF weights", fix=fix)
        return UserError(
            f"no weights in {self.directory}",
            why=f"neither {SINGLE} nor {INDEX}; it holds: {contents_of(self.directory)}",
            fix="name a complete model directory (config.json, *.safetensors, tokenizer)",
        )


#: What wrappers put before the names of a model's tensors.
_WRAPPERS = ("model.", "module.", "base_model.model.", "_orig_mod.", "language_model.")


def _fix_of(missing: list[str], unknown: list[str]) -> str:
    """Return what to do about missing and unknown tensors."""
    if missing == ["lm_head.weight"] and not unknown:
        return (
            "download the missing file again; if the output layer is the embedding, set "
            "tie_word_embeddings to true in config.json"
        )
    if any(".lora_A." in name or ".lora_B." in name for name in unknown):
        return (
            "merge the adapter into the weights (PEFT's merge_and_unload), or name the plain model "
            "here and the adapter with --lora-adapter-path"
        )
    for prefix in _WRAPPERS:
        if unknown and {name.removeprefix(prefix) for name in unknown} == set(missing):
            return f"save the model itself, not its wrapper: all names begin with '{prefix}'"
    if unknown and {f"model.{name}" for name in unknown} == set(missing):
        return "save the whole model, with its output layer: the names lack 'model.'"
    if unknown and not missing:
        return (
            "remove the unknown tensors from the files; if config.json belongs to another model, "
            "replace it"
        )
    return "download the missing files again; if config.json belongs to another model, replace it"


def _layers_of(names: Iterable[str]) -> str:
    """Format the layers of the tensors as ranges: "3-5, 9"."""
    layers = sorted(
        {int(found.group(1)) for name in names if (found := re.search(r"\.layers\.(\d+)\.", name))}
    )
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _describe(names: list[str], adjective: str, spec: ModelSpec) -> list[str]:
    """Describe missing or unknown tensors with their number, layers and first names."""
    if not names:
        return []
    count = f"{len(names)} tensors {adjective}" if len(names) > 1 else f"1 tensor {adjective}"
    layers = _layers_of(names)
    where = f" in layers {layers} of {spec.num_layers}" if layers else ""
    return [f"{count}{where}: {first_few(names)}"]


def check_export(directory: Path, kept: Mapping[str, Path]) -> None:
    """Check that an export, which replaces its whole directory, replaces only an earlier export.

    Args:
        kept: flag → path that must not be lost.
    Raises:
        UserError: one of ``kept`` is the directory or inside it, or the directory has other
            contents than a model's files.
    """
    fix = (
        "give exports a directory of their own, e.g. --save-hf exports/{rollout_id}; "
        "--no-export-model makes none"
    )
    for flag, path in kept.items():
        if path.resolve() == directory.resolve():
            why = "the export replaces the directory as a whole, and what is there would be lost"
            raise UserError(f"{directory} is the {flag} itself", why=why, fix=fix)
        if path.resolve().is_relative_to(directory.resolve()):
            why = f"the export replaces the directory as a whole, and {path} would be lost"
            raise UserError(f"{directory} holds {flag} {path}", why=why, fix=fix)
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    is_model = any(entry.name.endswith(".safetensors") for entry in entries)
    if (
        directory.is_file()
        or any(entry.is_dir() and entry.name != _NAMED_TEMPLATES for entry in entries)
        or (entries and not is_model)
    ):
        there = "a file" if directory.is_file() else contents_of(directory)
        why = f"the export replaces the directory as a whole; there is: {there}"
        raise UserError(
            f"{directory} holds something else than an earlier export", why=why, fix=fix
        )


class HfWriter:
    """Writes a Hugging Face directory: shards, index, config and tokenizer assets. Visible only
    when complete.

    Args:
        directory: final path; an earlier export is replaced as a whole.
        assets_from: directory whose config and tokenizer files are copied.
        shard_bytes: upper bound of the size of a weight file.
        quantised: the tensors match the quantization_config of ``assets_from``; otherwise they are
            unquantised, and it is removed from the copy of config.json.
        config_changes: entries of config.json that replace those of ``assets_from``.
    Raises:
        UserError: ``directory`` must not be replaced (`check_export`).
    """

    def __init__(
        self,
        directory: str | Path,
        assets_from: str | Path,
        shard_bytes: int = 4 << 30,
        *,
        quantised: bool = False,
        config_changes: Mapping[str, Any] | None = None,
    ) -> None:
        self._quantised = quantised
        self._config_changes = config_changes or {}
        self.directory = Path(directory)
        self.assets_from = Path(assets_from)
        self.shard_bytes = shard_bytes
        check_export(self.directory, {"--hf-checkpoint": self.assets_from})

    def __enter__(self) -> HfWriter:
        self._partial = partial_dir(self.directory)
        self._open: dict[str, torch.Tensor] = {}
        self._open_bytes = self.total_bytes = 0
        self._shards: list[list[str]] = []
        self._dtypes: Counter[str] = Counter()
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor; a full shard is written at once."""
        from slime.engines.wire.buckets import dtype_name

        nbytes = tensor.nbytes
        if self._open and self._open_bytes + nbytes > self.shard_bytes:
            self._flush()
        # a copy, as a view would be saved with its whole storage, and may change before the flush
        self._open[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._open_bytes += nbytes
        self.total_bytes += nbytes
        self._dtypes[dtype_name(tensor.dtype)] += tensor.numel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        try:
            self._flush()
            with self._explained():
                self._finish()
        except UserError:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the disk into user errors."""
        try:
            yield
        except OSError as failure:
            raise UserError(
                f"could not write {self.directory}",
                why=f"{failure.strerror or failure}, after {self.total_bytes / 1e9:.1f} GB of "
                "weights",
                fix="free space, or pass another --save-hf; nothing was left half-written",
            ) from failure

    def _flush(self) -> None:
        from slime.checkpoints.safetensors_stream import table_of, write_stream

        if self._open:
            name = f"shard-{len(self._shards):05d}.safetensors"
            with self._explained():
                write_stream(self._partial / name, table_of(self._open), self._open.items())
            self._shards.append(list(self._open))
            self._open = {}
            self._open_bytes = 0

    def _finish(self) -> None:
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._partial / f"shard-{number:05d}.safetensors").rename(self._partial / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            (self._partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        dtype = self._dtypes.most_common(1)[0][0] if self._dtypes and not self._quantised else None
        copy_assets(self.assets_from, self._partial, dtype)
        if self._config_changes:
            path = self._partial / "config.json"
            config = json.loads(path.read_text()) | dict(self._config_changes)
            path.write_text(json.dumps(config, indent=2) + "\n")
        publish(self._partial, self.directory)


def copy_named_templates(source: Path, target: Path) -> None:
    """Copy the chat templates besides the default one."""
    folder = source / _NAMED_TEMPLATES
    if folder.is_dir():
        shutil.copytree(folder, target / folder.name, dirs_exist_ok=True)


def copy_assets(source: Path, target: Path, dtype: str | None = None) -> None:
    """Copy config, tokenizer and remote-code files: all top-level files except weights, and named
    chat templates.

    Args:
        dtype: dtype of unquantised weights, which is written to config.json, without
            quantization_config. None leaves config.json unchanged.
    """
    for entry in sorted(source.iterdir()):
        if (
            not entry.is_file()
            or entry.name.startswith(".")
            or entry.name.endswith(_WEIGHT_SUFFIXES)
        ):
            continue
        shutil.copyfile(entry, target / entry.name)
    copy_named_templates(source, target)
    config_path = target / "config.json"
    if dtype is not None and config_path.is_file():
        config = json.loads(config_path.read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        config.pop("quantization_config", None)
        write_interval(config)
        config_path.write_text(json.dumps(config, indent=2) + "\n")
