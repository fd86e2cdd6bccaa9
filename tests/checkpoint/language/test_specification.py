"""Specifications: the same text reads a foreign system's tensors and writes them back."""

from __future__ import annotations

import tomllib
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from elastic_train.checkpoint.language.describe import describe
from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.resolve import to_ours, to_theirs
from elastic_train.checkpoint.lazy_arrays import TensorInfo
from elastic_train.errors import ConfigError, TensorMismatch

pytestmark = pytest.mark.ring0

Read = Callable[..., dict]
ATTENTION = """
[[rule]]
select = "h.{l}.qkv.weight"
to = ["h.{l}.q.weight", "h.{l}.k.weight", "h.{l}.v.weight"]
operations = [{ op = "split", heads = 4, kv_heads = 2, grouped = true }]
"""


def _arange(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def _equal(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=str(name))


def test_grouped_heads_mean_the_same_attention(imported: Read) -> None:
    heads, kv, size, width = 4, 2, 3, 8
    fused = np.random.default_rng(0).standard_normal(((heads + 2 * kv) * size, width)).astype(np.float32)
    ours = imported(ATTENTION, {"h.0.qkv.weight": fused})
    # Megatron-LM's own reading: [groups, queries of a group + 2, size, width].
    grid = fused.reshape(kv, heads // kv + 2, size, width)
    np.testing.assert_array_equal(ours["h.0.q.weight"], grid[:, :-2].reshape(heads * size, width))
    np.testing.assert_array_equal(ours["h.0.k.weight"], grid[:, -2].reshape(kv * size, width))
    np.testing.assert_array_equal(ours["h.0.v.weight"], grid[:, -1].reshape(kv * size, width))


def test_a_round_trip_is_exact_for_every_operation_at_once(imported: Read, exported: Callable) -> None:
    text = f"""
ties = {{ "head.weight" = "embed.weight" }}
{ATTENTION}[[rule]]
select = "wte.weight"
to = "embed.weight"
operations = [{{ op = "strip", size = 10, padded = 12 }}]
[[rule]]
select = "h.{{l}}.c_fc.weight"
to = "h.{{l}}.up.weight"
operations = [{{ op = "transpose", order = [1, 0] }}]
[[rule]]
select = ["h.{{l}}.experts.{{e}}.gate", "h.{{l}}.experts.{{e}}.up"]
to = "h.{{l}}.experts.w13"
operations = [{{ op = "fuse", parts = 2 }}, {{ op = "stack" }}]
[[rule]]
select = "h.{{l}}.{{norm:ln_1|ln_2}}.weight"
to = "h.{{l}}.{{norm}}.scale"
"""
    theirs = {
        "h.0.qkv.weight": _arange(16, 8),
        "wte.weight": np.concatenate([_arange(10, 8), np.zeros((2, 8), np.float32)]),
        "h.0.c_fc.weight": _arange(8, 5),
        "h.0.ln_1.weight": _arange(8),
        "h.0.ln_2.weight": _arange(8, start=8),
        **{f"h.0.experts.{e}.gate": _arange(3, 8, start=100 * e) for e in range(11)},
        **{f"h.0.experts.{e}.up": _arange(3, 8, start=100 * e + 50) for e in range(11)},
    }
    theirs |= {(name, "exp_avg"): array + 1 for name, array in theirs.items() if name != "wte.weight"}
    ours = imported(text, theirs)
    assert ours["h.0.experts.w13"].shape == (11, 6, 8)
    np.testing.assert_array_equal(ours["h.0.experts.w13"][10, 3:], theirs["h.0.experts.10.up"])
    np.testing.assert_array_equal(ours["h.0.up.weight"], theirs["h.0.c_fc.weight"].T)
    assert ours["embed.weight"].shape == (10, 8)
    (back,) = exported(text, ours)
    _equal(back, theirs)


@pytest.mark.parametrize("kind", ['kind = "fragment"', 'kind = "fragment"\ndim = 1', 'kind = "replicated"'])
def test_extract_undoes_union(kind: str, imported: Read, exported: Callable) -> None:
    text = f'[[rule]]\nselect = "w"\n{kind}'
    whole = _arange(4, 6)
    parts = exported(text, {"w": whole}, parts=2)
    _equal(imported(text, *parts), {"w": whole})


def test_sub_fragments_are_cut_one_by_one(imported: Read, exported: Callable) -> None:
    text = '[[rule]]\nselect = "w"\nkind = "fragment"\nsub_fragments = { parts = 2 }'
    gate, up = _arange(4, 3), _arange(4, 3, start=50)
    parts = [{"w": np.concatenate([gate[i : i + 2], up[i : i + 2]])} for i in (0, 2)]
    _equal(imported(text, *parts), {"w": np.concatenate([gate, up])})
    for found, wanted in zip(exported(text, imported(text, *parts), parts=2), parts, strict=True):
        _equal(found, wanted)


def test_uneven_widths_are_given(imported: Read) -> None:
    text = (
        '[[rule]]\nselect = "w"\nkind = "fragment"\nsub_fragments = { sizes = [3, 2] }\n'
        "widths = [[2, 1], [1, 1]]"
    )
    whole = _arange(5, 2)
    parts = [{"w": whole[[0, 1, 3]]}, {"w": whole[[2, 4]]}]
    _equal(imported(text, *parts), {"w": whole})
    with pytest.raises(TensorMismatch, match="give it `widths`"):
        imported(text.rpartition("\n")[0], *parts)


def test_an_average_is_explicit_and_never_exported(imported: Read, exported: Callable) -> None:
    text = '[[rule]]\nselect = "norm"\nkind = "average"'
    parts = [{"norm": np.array([1, 3], np.float32)}, {"norm": np.array([2, 6], np.float32)}]
    _equal(imported(text, *parts), {"norm": np.array([1.5, 4.5], np.float32)})
    with pytest.raises(ConfigError, match=r"rule 1: can't be exported: an average has no inverse"):
        exported(text, {"norm": parts[0]["norm"]})
    with pytest.raises(TensorMismatch, match="2 parts hold it; say whether"):
        imported('[[rule]]\nselect = "norm"', *parts)


def test_a_cast_rounds_to_nearest_and_says_the_way_back(imported: Read, exported: Callable) -> None:
    text = '[[rule]]\nselect = "w"\noperations = [{ op = "cast", to = "float32", back = "bfloat16" }]'
    stored = np.array([1.0, 2.5, -3.0], ml_dtypes.bfloat16)
    ours = imported(text, {"w": stored})
    _equal(ours, {"w": stored.astype(np.float32)})
    _equal(exported(text, {"w": ours["w"] + np.float32(1e-4)})[0], {"w": stored})


def test_states_are_renamed_both_ways(imported: Read, exported: Callable) -> None:
    text = 'rest = "keep"\n[[rule]]\nselect = "w"\nonly = "fp32"\nstates = { fp32 = "param" }'
    theirs = {("w", "fp32"): _arange(2), ("w", "exp_avg"): _arange(2, start=5)}
    ours = imported(text, theirs)
    _equal(ours, {"w": _arange(2), ("w", "exp_avg"): _arange(2, start=5)})
    _equal(exported(text, ours)[0], theirs)


def test_buffers_are_told_from_parameters(imported: Read, exported: Callable) -> None:
    text = 'rest = "keep"\nbuffers = "{path...}.running_mean"'
    ours = imported(text, {"bn.running_mean": _arange(2), "bn.weight": _arange(2)})
    _equal(ours, {("bn.running_mean", "buffer"): _arange(2), "bn.weight": _arange(2)})
    assert "bn.running_mean" in exported(text, ours)[0]


def test_tied_tensors_are_kept_once_whichever_is_stored() -> None:
    spec = parse('rest = "keep"\nties = { "head" = "embed" }')
    info = TensorInfo(dtype="float32", shape=(2,))
    for stored in (["head"], ["embed"], ["head", "embed"]):
        resolved = to_ours(spec, [{(n, "param"): info for n in stored}], url="theirs")
        assert set(resolved.tensors) == {("embed", "param")}
        assert resolved.aliases == {"head": "embed"}
        assert len(resolved.claims) == len(stored) - 1
    ours = {("embed", "param"): info}
    assert set(to_theirs(spec, ours, url="ours")[0].tensors) == {("embed", "param")}
    both = parse('rest = "keep"\nwrite_ties = true\nties = { "head" = "embed" }')
    assert set(to_theirs(both, ours, url="ours")[0].tensors) == {("embed", "param"), ("head", "param")}


@pytest.mark.parametrize(
    ("text", "names", "problem"),
    [
        (ATTENTION, ["h.0.qkv.weights"], r"no rule selects h.0.qkv.weights .*; did you mean h.{l}.qkv"),
        (ATTENTION + ATTENTION, ["h.0.qkv.weight"], "selected twice, by .* rule 1 and by .* rule 2"),
        ('rest = "keep"\n[[rule]]\nselect = "embd.weight"', ["embed.weight"], "did you mean embed.weight"),
        ('[[rule]]\nselect = ["{l}.gate", "{l}.up"]\nto = "{l}.w"\noperations = [{ op = "fuse" }]',
         ["0.gate"], "0.gate .* is there without 0.up"),
        ('[[rule]]\nselect = "e.{e}.w"\nto = "w"\noperations = [{ op = "stack" }]',
         ["e.0.w", "e.2.w"], "without e.1.w"),
        ('[[rule]]\nselect = "e.{e}.w"\nto = "w"', ["e.0.w", "e.1.w"], "makes 2 tensors, and `to` names 1"),
        ('[[rule]]\nselect = "{a:x|y}"\nto = "z"\noperations = [{ op = "stack" }]', ["x"], "not by a number"),
        ('rest = "keep"\n[[rule]]\nselect = "a"\nto = "b"', ["a", "b"], "both make b"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_listed(text: str, names: list[str], problem: str) -> None:
    infos = {(n, "param"): TensorInfo(dtype="float32", shape=(16, 2)) for n in names}
    with pytest.raises(TensorMismatch, match=problem):
        to_ours(parse(text), [infos], url="theirs")


def test_a_state_of_another_shape_needs_its_own_rule() -> None:
    infos = {
        ("h.0.qkv.weight", "param"): TensorInfo(dtype="float32", shape=(16, 2)),
        ("h.0.qkv.weight", "exp_avg_row"): TensorInfo(dtype="float32", shape=(16,)),
    }
    with pytest.raises(TensorMismatch, match="limit the rule with `only`"):
        to_ours(parse(ATTENTION), [infos], url="theirs")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[[rule]]\nselct = 'a'", "specification, rule 1, selct: is no key here; did you mean select"),
        (
            "[[rule]]\nselect = 'a'\nkind = 'fragmnt'",
            "rule 1, kind: 'fragmnt' is none of .*did you mean fragment",
        ),
        ("[[rule]]\nselect = 'a{'", "rule 1, select: 'a{' is no pattern"),
        ("[[rule]]\nto = 'a'", "rule 1, select: names no tensor"),
        ("[[rule]]\nselect = '{a}.{b}'\nto = 'x'", "rule 1, to: a, b are captured on one side only"),
        ("[[rule]]\nselect = ['{a}', 'x']\nto = '{a}'", "rule 1, select: 'x' and '{a}' capture different"),
        ("[[rule]]\nselect = 'a'\noperations = [{ op = 'spilt' }]", "operation 1, op: .* did you mean split"),
        ("[[rule]]\nselect = 'a'\noperations = [{ op = 'split' }]", "operation 1, parts: is missing"),
        ("[[rule]]\nselect = 'a'\noperations = [{ op = 'transpose', order = [0, 0] }]", "transpose: order"),
        (
            "[[rule]]\nselect = 'a'\noperations = [{ op = 'split', heads = 3, kv_heads = 2 }]",
            "heads: 3 heads",
        ),
        (
            "[[rule]]\nselect = 'a'\noperations = [{ op = 'cast', to = 'int8' }]",
            "cast: 'int8' is no floating",
        ),
        ("[[rule]]\nselect = 'a'\noperations = [{ op = 'strip', size = 'x' }]", "size: must be a int"),
        ("ties = { a = 'b', b = 'c' }", "ties.'a': b is an alias itself"),
        ("version = 2", "version: 2 is unknown"),
        ("rule = [", "isn't TOML"),
    ],
)
def test_a_wrong_specification_is_refused_at_its_rule_and_key(text: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.match(where)


def test_the_resolved_map_is_printed() -> None:
    infos = {("h.0.qkv.weight", "param"): TensorInfo(dtype="float32", shape=(6, 2))}
    spec = parse(ATTENTION.replace("heads = 4", "heads = 2"))
    assert describe(to_ours(spec, [infos], url="theirs")).splitlines()[:3] == [
        "h.0.k.weight (param): float32 [2, 2], by specification, rule 1",
        "  [0:1,0:2] = h.0.qkv.weight (param)[1:2,0:2]",
        "  [1:2,0:2] = h.0.qkv.weight (param)[4:5,0:2]",
    ]


def test_python_values_are_the_same_specification_with_the_same_errors() -> None:
    values = tomllib.loads(ATTENTION)
    assert parse(values) == parse(ATTENTION)
    assert parse({"rule": ({"select": ("a", "b"), "to": ("c", "d")},)}) == parse(
        "[[rule]]\nselect = ['a', 'b']\nto = ['c', 'd']"
    )
    assert values == tomllib.loads(ATTENTION), "what was given stays as it was"
    with pytest.raises(ConfigError, match="rule 1, selct: is no key here; did you mean select"):
        parse({"rule": [{"selct": "a"}]})
