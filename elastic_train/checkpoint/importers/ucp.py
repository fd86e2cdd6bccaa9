"""DeepSpeed's universal checkpoints: one directory of files per parameter (`ds_to_universal`).

Two kinds of files. From ZeRO-1 and -2: a dictionary with the parameter in its shape and, in `step.pt`, its
counter. From ZeRO-3: the bare elements, flat, whose shape and counter are elsewhere. Buffers, frozen
parameters and ties are read from the model files beside them, which are the ones of the checkpoint that was
converted; its converter drops or cuts some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.importers.deepspeed import parallel_of, zero_facts
from elastic_train.checkpoint.importers.deepspeed_files import Tag, open_tag
from elastic_train.checkpoint.importers.deepspeed_model import (
    aliases_of,
    facts_of,
    other_rows,
    shapes_by_group,
)
from elastic_train.checkpoint.importers.foreign_document import (
    OptimizerState,
    document,
    hyperparameters,
    scalar,
)
from elastic_train.checkpoint.importers.foreign_rows import whole_row
from elastic_train.checkpoint.importers.imported import Imported, imported
from elastic_train.checkpoint.importers.pickle_free import TensorRef
from elastic_train.checkpoint.importers.torch_file import TorchFile, check_readable, open_file, open_files
from elastic_train.checkpoint.importers.tp_patterns import TensorParallel
from elastic_train.checkpoint.importers.zero3 import agreed_shapes, state_of_sub_groups
from elastic_train.checkpoint.importers.zero12 import optimizer_state
from elastic_train.checkpoint.importers.zero_state import Scalars
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import FormatUnsupported, FragmentMissing, TensorMismatch
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store

_SETTINGS = "zero/optimizer_state.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """The files of the parameters: fqn -> state -> file, and where they are."""

    url: str
    files: Mapping[str, Mapping[str, TorchFile]]
    directory: str

    def name(self, file: TorchFile) -> str:
        return file.path.removeprefix(f"{self.directory}/") if self.directory else file.path


def open_universal(store: Store, directory: str, options: Options | None = None) -> Imported:
    """Index a universal directory."""
    tag = open_tag(store, directory, optimizer=False)
    settings = open_file(store, f"{directory}/{_SETTINGS}" if directory else _SETTINGS)
    if not isinstance(settings.tree, dict) or not isinstance(settings.tree.get("param_groups"), list):
        raise FormatUnsupported(url=settings.url, problem="it doesn't say the optimizer's parameter groups.")
    atoms = _atoms(store, directory)
    shapes = agreed_shapes(tag) if tag.partitioned else _shapes(tag)
    owned = sorted({fqn for group in shapes for fqn in group})
    aliases = aliases_of(tag, owned)
    parallel = TensorParallel(url=tag.url, degree=1, info=None)
    rest = list(other_rows(tag, owned, aliases, parallel))
    if parallel_of(tag).degree > 1 and any(row.state == "param" for row in rest):
        raise FormatUnsupported(
            url=tag.url,
            problem="it has frozen parameters and was written by several tensor-parallel ranks, of which "
            "the converter "
            "keeps one rank's slice. Open the checkpoint that was converted.",
        )
    _check_names(atoms, owned, {*aliases, *(row.tensor for row in rest)})
    whole = {fqn: shape for group in shapes for fqn, shape in group.items()}
    rows = [row for fqn in owned for row in _rows(atoms, fqn, whole[fqn])]
    optimizer = _optimizer(settings, shapes, atoms, rows, partitioned=tag.partitioned)
    facts, lost = facts_of(tag)
    said = document(
        step=tag.model().tree.get("global_steps"),
        aliases=aliases,
        optimizer=optimizer,
        system="DeepSpeed universal checkpoint",
        facts={**facts, **zero_facts(settings.tree)},
        not_restored=lost,
    )
    return imported(store, directory, [*rows, *rest], said, aliases=aliases, options=options)


def _atoms(store: Store, directory: str) -> Atoms:
    prefix = f"{directory}/zero/" if directory else "zero/"
    paths = [p for p in store.list(prefix.rstrip("/")) if p.endswith(".pt") and "/" in p.removeprefix(prefix)]
    found: dict[str, dict[str, TorchFile]] = {}
    for path, file in open_files(store, paths).items():
        fqn, _, name = path.removeprefix(prefix).rpartition("/")
        found.setdefault(fqn, {})[name.removesuffix(".pt")] = file
    return Atoms(url=f"{store.url}/{directory}".rstrip("/"), files=found, directory=directory)


def _shapes(tag: Tag) -> list[dict[str, tuple[int, ...]]]:
    """The parameters by group, of all pipeline stages."""
    found: list[dict[str, tuple[int, ...]]] = []
    for mp in range(tag.ranks[1]):
        for number, group in enumerate(shapes_by_group(tag.model(mp))):
            if number == len(found):
                found.append({})
            found[number] |= {k: v for k, v in group.items() if not any(k in own for own in found)}
    return found


def _rows(atoms: Atoms, fqn: str, shape: tuple[int, ...]) -> list[Row]:
    """Master weights and moments of one parameter; the file of ranks that cut it knows its shape better."""
    rows: list[Row] = []
    for name, file in atoms.files[fqn].items():
        value = file.tree
        state = "param" if name == "fp32" else name
        check_readable(value, f"{fqn} ({state})", url=file.url)
        if isinstance(value, dict):
            check_readable(value.get("param"), f"{fqn} ({state})", url=file.url)
        if isinstance(value, dict) and isinstance(value.get("param"), TensorRef):
            rows.append(whole_row(file, atoms.name(file), fqn, state, value["param"]))
        elif isinstance(value, TensorRef) and name != "step":
            rows.append(whole_row(file, atoms.name(file), fqn, state, value, shape=shape))
        elif name != "step":
            raise FormatUnsupported(url=file.url, problem="it is no file that ds_to_universal writes.")
    shapes = {row.shape for row in rows}
    if len(shapes) != 1 or (rows[0].shape != shape and not _joined(atoms.files[fqn]["fp32"])):
        raise TensorMismatch(
            url=atoms.url, problem=f"{fqn} should have shape {shape} and has {sorted(shapes)}."
        )
    return rows


def _joined(file: TorchFile) -> bool:
    """Whether it may have been joined from slices, so that the model files know only a slice's shape."""
    return isinstance(file.tree, dict) and "cat_dim" in file.tree


def _check_names(atoms: Atoms, owned: Sequence[str], others: set[str]) -> None:
    gone = [fqn for fqn in owned if "fp32" not in atoms.files.get(fqn, {})]
    if gone:
        raise FragmentMissing(
            url=atoms.url,
            problem=f"{len(gone)} of {len(owned)} parameters have no fp32.pt, the first is {gone[0]}.",
        )
    strange = sorted(atoms.files.keys() - set(owned) - others)
    if strange:
        raise TensorMismatch(
            url=atoms.url,
            problem=f"{strange[0]} has files and isn't in the model; {len(strange)} names differ.",
        )
    first = sorted(atoms.files[owned[0]]) if owned else []
    for fqn in owned:
        if sorted(atoms.files[fqn]) != first:
            raise FragmentMissing(
                url=atoms.url,
                problem=f"{fqn} has the files {sorted(atoms.files[fqn])} and {owned[0]} has {first}.",
            )


def _optimizer(
    settings: TorchFile,
    shapes: Sequence[Mapping[str, Any]],
    atoms: Atoms,
    rows: Sequence[Row],
    *,
    partitioned: bool,
) -> OptimizerState:
    groups = settings.tree["param_groups"]
    if partitioned:
        kept = settings.tree.get("optimizer_state_dict", {}).get("state", {})
        numbers: list[Scalars] = [_numbers(settings, kept.get(n, {})) for n in range(len(shapes))]
        return state_of_sub_groups(settings, groups, [list(g) for g in shapes], numbers, rows)
    found = optimizer_state(
        [list(g) for g in shapes],
        [hyperparameters(settings, g) for g in groups],
        [{} for _ in shapes],
        rows,
        url=settings.url,
    )
    steps = {
        fqn: {"step": scalar(own["step"], own["step"].tree)}
        for fqn, own in atoms.files.items()
        if "step" in own
    }
    return OptimizerState(
        groups=found.groups, scalars={**found.scalars, **steps}, states=found.states, kind=found.kind
    )


def _numbers(file: TorchFile, state: Mapping[str, Any]) -> Scalars:
    return {
        str(name): scalar(file, value)
        for name, value in state.items()
        if not isinstance(value, TensorRef) or value.shape in ((), (1,))
    }
