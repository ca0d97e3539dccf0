"""The tables that flags come from: complete, up to date with the installed libraries, and
documented."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slime.config.data import read_table, record_of
from slime.config.engine_flags import (
    ROUTER_RESERVED,
    SGLANG_RESERVED,
    router_flags,
    sglang_args_of,
    sglang_flags,
    stored_sglang_args,
    to_argv,
)
from slime.config.flag import RefusedFlag, docs_of
from slime.config.flags import GROUPS, all_flags, own_flags, spellings
from slime.config.help import flags_page, print_help
from slime.config.megatron_flags import FIELDS, NAMES, SHORTHANDS, lm_flags, megatron_core

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("tables", ROOT / "tools" / "make_flag_tables.py")
assert _spec is not None and _spec.loader is not None
make_tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_tables)
LISTED = (Path(__file__).parents[1] / "support" / "reference_flags.txt").read_text().splitlines()
REFERENCE = [line for line in LISTED if not line.startswith("#")]
OF_GUIDES = LISTED[LISTED.index("# Flags of its troubleshooting guides") + 1 :]


def test_every_flag_of_the_reference_system_is_known() -> None:
    assert [name for name in REFERENCE if name not in spellings()] == []


def test_flags_of_the_guides_work_and_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    print_help("train", ["--help", "all"])
    words = set(capsys.readouterr().out.replace(",", " ").replace("]", " ").split())
    missing = [name for name in OF_GUIDES if f"--{name}" not in words]
    refused = [
        name
        for name in OF_GUIDES
        if (spec := spellings()[name].spec) is not None and spec.meta.refused
    ]
    assert missing == refused == []


def test_every_flag_of_ours_has_a_sentence_of_help() -> None:
    for cls in GROUPS.values():
        docs = docs_of(cls)
        for field in dataclasses.fields(cls):
            assert not field.metadata or docs[field.name].endswith("."), field.name


def test_docs_have_every_flag_with_a_status() -> None:
    rows = [line for line in flags_page().splitlines() if line.startswith("| `--")]
    names = {name.strip("` ") for row in rows for name in row.split("|")[1].split(",")}
    assert {spec.option for spec in all_flags().values() if "sglang" not in spec.sections} <= names
    assert all(
        any(status in row for status in ("| works", "| refused: ", "| no effect: ")) for row in rows
    )


def test_a_table_with_a_wrong_key_is_refused() -> None:
    row = read_table("refused_flags.toml")["cluster"][0]
    assert record_of(RefusedFlag, row).optional
    with pytest.raises(TypeError, match="optionally"):
        record_of(RefusedFlag, {**row, "optionally": True})


# -- Megatron --------------------------------------------------------------------------------------


def test_tables_are_those_of_the_installed_packages() -> None:
    installed = json.loads(json.dumps([make_tables.megatron_table(), make_tables.router_table()]))
    assert installed == [megatron_core(), read_table("sglang_router.json")]


def test_native_fields_are_those_of_the_installed_classes() -> None:
    """What `ast` reads is what importing the classes shows."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = {
        "transformer": TransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }
    scalars = (bool, int, float, str)
    for section, cls in classes.items():
        read = {row["name"]: row for row in megatron_core()["fields"] if row["section"] == section}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        assert set(read) <= set(fields)
        for name, field in fields.items():
            if type(field.default) in scalars and "argparse_meta" not in str(field.metadata):
                assert name in read or name.startswith("_") or name == "activation_func", name
                assert read[name]["default"] == field.default, name


def test_tables_name_only_fields_that_exist() -> None:
    fields = {row["name"] for row in megatron_core()["fields"]}
    table = read_table("megatron.toml")
    assert fields >= {*NAMES, *FIELDS, *table["skipped_fields"]}
    for shorthand in SHORTHANDS.values():
        assert set(shorthand["sets"]) <= set(all_flags())
    named = [
        *table["refused_arguments"],
        *table["always"],
        *(row["name"] for row in table["model"]),
    ]
    assert sorted(named) == sorted(lm_flags())


# -- SGLang and the router -------------------------------------------------------------------------


def test_sglang_table() -> None:
    version, arguments = stored_sglang_args()
    names = {arg.name for arg in arguments}
    assert version == "0.5.23" and len(arguments) > 400
    assert set(SGLANG_RESERVED) <= names | {arg.name for arg in sglang_args_of("0.5.16")[1]}
    flags = sglang_flags()
    assert flags["sglang_mem_fraction_static"].kind == "float"
    assert flags["sglang_disable_cuda_graph"].kind == "bool"
    assert flags["sglang_context_length"].kind == "str"  # SGLang reads 128k too
    assert flags["sglang_moe_a2a_backend"].choices[:2] == ("none", "deepep")
    assert "--sglang-tensor-parallel-size" in flags["sglang_tp_size"].options


SERVER_ARGS = """
CHOICES = ["a", "b"]
@dataclasses.dataclass
class ServerArgs:
    model_path: A[str, Arg(help="Path.", aliases=["--model"])]
    fraction: A[Optional[float], "The fraction."] = None
    tp_size: A[int, Arg(help="x", aliases=["--tensor-parallel-size"])] = 1
    backend: A[str, Arg(help="h", choices=CHOICES + ["c"], cli_name="--the-backend")] = "a"
    sizes: A[Optional[List[int]], Arg(help="h")] = None
    mode: A[Literal["x", "y"], "m"] = "x"
    options: A[Optional[dict], Arg(help="h", type_parser=json.loads)] = None
    lora: A[Optional[bool], Arg(help="h", action=argparse.BooleanOptionalAction)] = None
    maybe: A[Optional[str], Arg(help="h", nargs="?", const="")] = None
    hidden: A[bool, Arg(no_cli=True)] = False
    switch: A[bool, "s"] = False
    plain: int = 3

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--config", type=str)
        parser.add_argument("--old", action=DeprecatedAliasStoreAction, type=int, nargs="+", \
new_flag="--sizes")
        parser.add_argument("--gone", action=DeprecatedAction)
"""


def test_reading_server_args_from_source() -> None:
    args = {arg.name: arg for arg in make_tables.sglang_arguments(SERVER_ARGS)}
    assert set(args) == {
        "model_path",
        "fraction",
        "tp_size",
        "the_backend",
        "sizes",
        "mode",
        "options",
        "lora",
        "maybe",
        "switch",
        "config",
        "old",
        "gone",
    }
    assert args["the_backend"].choices == ("a", "b", "c") and args["the_backend"].default == "a"
    assert args["fraction"].kind == "float" and args["tp_size"].aliases == ("tensor_parallel_size",)
    assert (
        args["sizes"].many
        and args["sizes"].kind == "int"
        and args["old"].many
        and args["gone"].kind == "bool"
    )
    assert args["mode"].choices == ("x", "y") and args["options"].kind == "json"
    assert args["lora"].negatable and args["maybe"].value_optional


def test_arguments_that_are_declared_beside_server_args_are_read(tmp_path: Path) -> None:
    """From 0.5.20 on they are fields of classes in files of their own."""
    folder = "sglang/srt/arg_groups/"
    with zipfile.ZipFile(tmp_path / "sglang-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(folder + "choices.py", 'KINDS = ["a", "b"]')
        field = 'class Lora:\n    kind: A[str, Arg(help="k", choices=KINDS)] = "a"'
        wheel.writestr(folder + "fields/lora.py", "from __future__ import annotations\n" + field)
        server = 'class ServerArgs:\n    def add(parser):\n        parser.add_argument("--old")'
        wheel.writestr("sglang/srt/server_args.py", server)
    [kind, old] = make_tables.sglang_arguments(make_tables._source("1.0", tmp_path))
    assert (kind.name, kind.choices, old.name) == ("kind", ("a", "b"), "old")


def test_table_tells_how_other_releases_differ() -> None:
    newer = SERVER_ARGS.replace("switch: A", "knob: A").replace('= "x"', '= "y"')
    table = make_tables.sglang_table({"1.0": SERVER_ARGS, "1.1": newer})
    other = table["other_versions"]["1.0"]
    assert table["version"] == "1.1" and other["without"] == ["knob"]
    assert {row["name"] for row in other["arguments"]} == {"mode", "switch"}


@pytest.mark.parametrize(
    ("installed", "has", "lacks"),
    [
        ("0.5.15", "mem_fraction_static", "retraction_policy"),
        ("0.5.15.post1", "mem_fraction_static", "retraction_policy"),
        ("0.5.16", "cuda_graph_max_bs", "attn_dp_size"),
        ("0.5.23", "attn_dp_size", "cuda_graph_max_bs"),
        ("0.5.24", "attn_dp_size", "no_such"),
        ("0.5.9", "tensor_parallel_size", "tp_size"),
    ],
)
def test_an_installed_sglang_wins_over_the_newest(
    installed: str, has: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.config import engine_flags

    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    version, arguments = engine_flags.sglang_args.__wrapped__()
    names = {arg.name for arg in arguments}
    assert version == installed and has in names and lacks not in names


def test_router_table_is_what_the_router_accepts() -> None:
    import argparse

    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=True)
    theirs = {
        action.dest: action for action in parser._actions if action.dest.startswith("router_")
    }
    ours = router_flags()
    assert set(theirs) <= set(ours)
    kinds = {int: "int", float: "float", str: "str", None: "str"}
    for dest, action in theirs.items():
        if ours[dest].meta.refused:
            continue
        expected = "bool" if action.nargs == 0 else kinds[action.type]
        assert ours[dest].kind == expected, dest
        if action.default is not None and expected != "str" and not ours[dest].many:
            assert ours[dest].default == action.default, dest
    assert set(ROUTER_RESERVED) <= {spec.attribute for spec in ours.values()}


def test_to_argv_is_read_back_by_argparse() -> None:
    import argparse

    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    settings = {
        "policy": "random",
        "queue_size": -1,
        "dp_aware": True,
        "request_id_headers": ("a", "b"),
    }
    parsed = vars(parser.parse_args(to_argv(settings)))
    assert {key: parsed[key] for key in settings} == {**settings, "request_id_headers": ["a", "b"]}
    assert to_argv({"options": {"a": 1}, "lora": False}) == ["--options", '{"a": 1}', "--no-lora"]


# -- imports ---------------------------------------------------------------------------------------

_HEAVY = (
    "torch", "ray", "transformers", "sglang", "sglang_router", "megatron", "datasets", "numpy",
    "aiohttp",
)  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "import slime.config",
        "from slime.config import make_config; make_config(rollout_batch_size=2, "
        "num_layers=2).flat()",
        "from slime.__main__ import main; main(['train', '--help'])",
        "from slime.__main__ import main; main(['flags', 'lr'])",
        "from slime.config import parse_args; parse_args(['--rollout-batch-size=2', "
        "'--num-rollout=1', "
        "'--hf-checkpoint=m', '--prompt-data=p'])",
    ],
)
def test_flags_and_help_import_nothing_heavy(code: str) -> None:
    script = (
        f"{code}\nimport sys, json; print('\\n' + json.dumps(sorted(set(sys.modules) & "
        f"set({_HEAVY!r}))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr


def test_nothing_is_both_ours_and_native() -> None:
    assert all(spec.sections == () for spec in own_flags().values())
    assert all(spec.sections for dest, spec in all_flags().items() if dest not in own_flags())
