"""Input that is wrong ends in one clear message and exit code 2: no traceback, and nothing written."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from plora_jax.config.yamlfile import dump_yaml
from tests.refusal import refused, run
from tests.tiny import CONFIG, ROWS, write_model, write_rows, write_sweep


def plan_and_sweep(directory: Path, sweep: Path) -> str:
    """Both commands must refuse; return what they say, which must be the same."""
    planned = refused(directory, "plan", sweep, "--devices", "cpu-16GB", "--json", directory / "plan.json")
    swept = refused(directory, "sweep", sweep, "--out", directory / "out")
    assert planned.removeprefix("plora plan") == swept.removeprefix("plora sweep")
    return swept


GOOD_DATA = {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 16}
EXACT = GOOD_DATA | {"metric": "exact_match"}

SWEEPS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model: is missing"),
    ({"model": ""}, "model (line 1): is missing"),
    ({"model": 7}, "model (line 1): 7"),
    ({"model": ["a"]}, "model (line 1): ['a']"),
    ({"model": {"name": "a"}}, "model (line 1): {'name': 'a'}"),
    ({"data": None}, "data: is missing"),
    ({"data": "train.jsonl"}, "data (line 2): the text 'train.jsonl' is not a mapping"),
    ({"data": []}, "data (line 2): [] is not a mapping"),
    ({"data": {}}, "data.train (line 2): is missing"),
    ({"data": {"eval": "eval.jsonl"}}, "data.train (line 2): is missing"),
    ({"data": GOOD_DATA | {"train": 3}}, "data.train (line 3): 3 is not text"),
    ({"data": GOOD_DATA | {"train": None}}, "data.train (line 3): null is not text"),
    ({"data": GOOD_DATA | {"train": ["a", "b"]}}, "data.train (line 3): ['a', 'b'] is not text"),
    ({"data": GOOD_DATA | {"train": " "}}, "data.train (line 3): is empty"),
    ({"data": GOOD_DATA | {"eval": "train.jsonl"}}, "two of them name the same file"),
    ({"data": GOOD_DATA | {"eval": "./train.jsonl"}}, "two of them name the same file"),
    ({"data": GOOD_DATA | {"test": "model/../eval.jsonl"}}, "two of them name the same file"),
    (
        {"data": GOOD_DATA | {"answer": "last_number"}},
        "data.answer (line 6): has no effect with the metric loss",
    ),
    (
        {"data": EXACT | {"answer": "lastnumber"}},
        "data.answer (line 7): 'lastnumber' is not known; expected whole",
    ),
    (
        {"data": EXACT | {"answer": {"before": "x"}}},
        "data.answer (line 7): {'before': 'x'} is not one of whole",
    ),
    ({"data": EXACT | {"answer": {"after": " "}}}, "data.answer (line 7): after is empty"),
    ({"data": EXACT | {"answer": {"after": "a", "regex": "b"}}}, "is not one of whole"),
    ({"data": EXACT | {"answer": {"after": 4}}}, "is not allowed here; expected whole, last_number"),
    ({"data": EXACT | {"answer": {"regex": "(a"}}}, "is not a regular expression"),
    ({"data": EXACT | {"max_new_tokens": 0}}, "data.max_new_tokens (line 7): 0 is too small"),
    (
        {"data": GOOD_DATA | {"max_new_tokens": 9}},
        "data.max_new_tokens (line 6): has no effect with the metric",
    ),
    ({"data": GOOD_DATA | {"max_length": 0}}, "data.max_length (line 5): 0 is too small"),
    ({"data": GOOD_DATA | {"max_length": -5}}, "data.max_length (line 5): -5 is too small"),
    ({"data": GOOD_DATA | {"max_length": "long"}}, "data.max_length (line 5): the text 'long'"),
    ({"data": GOOD_DATA | {"max_length": 10**30}}, "is too large; expected a whole number from 8 to 1048576"),
    ({"data": GOOD_DATA | {"metric": "accuracy"}}, "data.metric (line 6): the text 'accuracy' is not known"),
    ({"data": GOOD_DATA | {"on_long": "cut"}}, "expected one of truncate, drop, error"),
    ({"data": GOOD_DATA | {"on_bad_row": "skp"}}, "did you mean skip?"),
    ({"data": GOOD_DATA | {"format": "chatml"}}, "expected one of auto, chat"),
    ({"data": GOOD_DATA | {"choices": ["yes", "no"]}}, "has no effect with the metric loss"),
    ({"data": GOOD_DATA | {"metric": "choice_accuracy", "choices": ["yes"]}}, "two or more different"),
    ({"data": GOOD_DATA | {"metric": "choice_accuracy", "choices": ["a", "a"]}}, "two or more different"),
    ({"data": GOOD_DATA | {"metric": "choice_accuracy", "choices": [1, 2]}}, "item 0: 1 is not text"),
    ({"data": GOOD_DATA | {"buckets": [32, 16]}}, "must rise, end at max_length (16)"),
    ({"data": GOOD_DATA | {"buckets": [8]}}, "must rise, end at max_length (16)"),
    ({"data": GOOD_DATA | {"buckets": [0, 16]}}, "item 0: 0 is too small"),
    ({"data": GOOD_DATA | {"buckets": 16}}, "16 is not allowed here; expected a list"),
    ({"data": GOOD_DATA | {"max_len": 16}}, "data.max_len (line 6): unknown key; did you mean max_length?"),
    ({"search": [1]}, "search (line 6): [1] is not a mapping"),
    ({"search": "grid"}, "search (line 6): the text 'grid' is not a mapping"),
    ({"search": {"rank": 0}}, "search.rank (line 7): 0 is too small; expected a whole number from 1 to 1024"),
    ({"search": {"rank": [8, 0]}}, "search.rank[1] (line 9): 0 is too small"),
    ({"search": {"rank": [-8]}}, "search.rank[0] (line 8): -8 is too small"),
    ({"search": {"rank": [8.5]}}, "search.rank[0] (line 8): 8.5 is not allowed here"),
    ({"search": {"rank": ["8"]}}, "the text '8' is text; write the number without quotes, as 8"),
    ({"search": {"rank": [True]}}, "search.rank[0] (line 8): true is not allowed here"),
    ({"search": {"rank": [None]}}, "search.rank[0] (line 8): null is not allowed here"),
    ({"search": {"rank": [[8]]}}, "search.rank[0] (line 8): [8] is not allowed here"),
    ({"search": {"rank": []}}, "search.rank (line 7): is an empty list"),
    ({"search": {"rank": 5000}}, "search.rank (line 7): 5000 is too large"),
    ({"search": {"learning_rate": ["1e-4"]}}, "the text '1e-4' is text; write the number without quotes"),
    ({"search": {"learning_rate": ["fast"]}}, "the text 'fast' is not allowed here; expected a number > 0"),
    (
        {"search": {"learning_rate": 0}},
        "search.learning_rate (line 7): 0 is too small; expected a number > 0",
    ),
    ({"search": {"learning_rate": -1e-4}}, "-0.0001 is too small"),
    ({"search": {"learning_rate": float("nan")}}, "nan is not allowed here; expected a number > 0"),
    ({"search": {"learning_rate": float("inf")}}, "inf is not allowed here"),
    ({"search": {"lr": 1e-4}}, "search.lr (line 7): unknown key; did you mean learning_rate?"),
    ({"search": {"ranks": [8]}}, "search.ranks (line 7): unknown key; did you mean rank?"),
    ({"search": {"rank": {"uniform": [8, 16]}}}, "a range needs `sample: N`"),
    ({"search": {"rank": {"uniform": [16, 8]}, "sample": 2}}, "must rise"),
    ({"search": {"rank": {"uniform": [8]}, "sample": 2}}, "expected [low, high]"),
    ({"search": {"rank": {"normal": [8, 2]}, "sample": 2}}, "is not a range"),
    ({"search": {"scheduler": {"uniform": [0, 1]}, "sample": 2}}, "a range needs a numeric field"),
    ({"search": {"weight_decay": {"log_uniform": [0, 1]}, "sample": 2}}, "must rise and start above 0"),
    ({"search": {"rank": [8], "sample": 0}}, "search.sample (line 9): 0 is too small"),
    ({"search": {"rank": [8], "sample": "all"}}, "search.sample (line 9): the text 'all'"),
    ({"search": {"rank": [8], "seed": -1}}, "search.seed (line 9): -1 is too small"),
    ({"search": {"jobs": []}}, "search.jobs (line 7): [] is not a list of jobs"),
    ({"search": {"jobs": {"rank": 8}}}, "is not a list of jobs"),
    ({"search": {"jobs": [8]}}, "search.jobs[0] (line 8): 8 is not a job"),
    ({"search": {"jobs": [{"rank": 0}]}}, "search.jobs[0].rank (line 8): 0 is too small"),
    ({"search": {"jobs": [{"rnk": 8}]}}, "search.jobs[0].rnk (line 8): unknown key; did you mean rank?"),
    ({"search": {"jobs": [{"alpha": 8, "alpha_ratio": 1}]}}, "contradicts alpha_ratio"),
    ({"search": {"jobs": [{"rank": 8}], "rank": [4]}}, "a literal list excludes rank"),
    ({"train": "fast"}, "train (line 13): the text 'fast' is not a mapping"),
    ({"train": {"batch_size": 0}}, "train.batch_size (line 14): 0 is too small"),
    ({"train": {"batch_size": [2, 4]}}, "to try several values, list them under search"),
    ({"train": {"epochs": 0}}, "train.epochs (line 14): 0 is too small; expected a number > 0"),
    ({"train": {"epochs": "two"}}, "train.epochs (line 14): the text 'two'"),
    ({"train": {"dropout": 1}}, "train.dropout (line 14): 1 is too large"),
    ({"train": {"warmup_ratio": 1.5}}, "train.warmup_ratio (line 14): 1.5 is too large"),
    ({"train": {"optimizer": "adam"}}, "did you mean adamw?"),
    ({"train": {"scheduler": "step"}}, "expected one of constant, linear, cosine"),
    ({"train": {"targets": []}}, "must name modules"),
    ({"train": {"targets": ["q_proj", "q_proj"]}}, "each once"),
    ({"train": {"use_rslora": "yes"}}, "expected true or false"),
    ({"train": {"rank_pattern": {"q_proj": 0}}}, "0 is too small"),
    ({"train": {"rank_pattern": ["q_proj"]}}, "a mapping from module pattern"),
    ({"train": {"seed": 1, "seeds": [1]}}, "contradicts seeds"),
    ({"train": {"seeds": []}}, "at least one"),
    ({"train": {"seeds": [1, 1]}}, "must be different seeds"),
    ({"train": {"keep": "all"}}, "expected one of best, last"),
    ({"train": {"rank": 8}}, "search.rank (line 7): is fixed under train as well"),
    ({"train": {"train": "other.jsonl"}}, "belong under data.train"),
    ({"eval": {"every_steps": 0}}, "eval.every_steps (line 16): 0 is too small"),
    ({"early_stop": {"method": "asah"}}, "did you mean asha?"),
    ({"early_stop": "asha"}, "is not a mapping"),
    (
        {"early_stop": {"method": "asha", "reduction_factor": 1}},
        "1 is too small; expected a whole number from 2",
    ),
    (
        {"early_stop": {"method": "asha", "grace_period": 1}},
        "1 is too large; expected a number > 0 and ≤ 0.99",
    ),
    ({"early_stop": {"method": "halving", "cohort": 1}}, "1 is too small; expected a whole number ≥ 2"),
    ({"early_stop": {"method": "median", "every": 0}}, "0 is too small; expected a number from 0.001 to 0.5"),
    ({"early_stop": {"method": "plateau", "patience": 0}}, "0 is too small; expected a whole number ≥ 1"),
    (
        {"search": {"rank": [4, 8], "method": "tpe", "budget": {"jobs": 2}}},
        "sweep.yaml: search.method (line 10)",
    ),
    ({"search": {"rank": [4, 8], "method": "optuna", "sampler": "tpee"}}, "did you mean tpe?"),
    ({"search": {"rank": [4, 8], "method": "optuna", "budget": 40}}, "40 is not a mapping; known keys: jobs"),
    (
        {"search": {"rank": [4, 8], "method": "optuna", "budget": {"gpu_hours": 0}}},
        "search.budget.gpu_hours (line 12): 0 is too small",
    ),
    ({"precision": "fp31"}, "(did you mean fp32?)"),
    ({"precision": {"base": 16}}, "precision.base (line 16): 16 is not known"),
    ({"precision": {"compute": "bf16"}}, "precision.compute (line 16): unknown key"),
    ({"export": {"base": 1}}, "export.base (line 16): unknown key"),
    ({"devices": []}, "devices (line 15): []"),
    ({"devices": ""}, "devices (line 15): is missing"),
    ({"base_dir": 3}, "base_dir (line 15): 3"),
    ({"seed": 1}, "seed (line 15): unknown key here; seed belongs under train or search"),
    ({"learning_rate": 1e-4}, "belongs under search or train"),
    ({"nonsense": 1}, "unknown key; known here: model, data, search"),
]


@pytest.mark.parametrize(
    ("changes", "says"), SWEEPS, ids=[dump_yaml(c).replace("\n", " ")[:50] for c, _ in SWEEPS]
)
def test_a_malformed_sweep(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in plan_and_sweep(tmp_path, write_sweep(tmp_path, **changes))


TEXTS: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"\n# nothing\n", "is empty"),
    (b"just text", "holds the text 'just text'"),
    (b"- model\n- data\n", "holds ['model', 'data']"),
    (b"42", "holds 42"),
    (b"model: [a, b", "is not YAML in line 1"),
    (b"model: a\n\tdata: b\n", "is not YAML in line 2"),
    (b"model: a\ndata: {train: x\nsearch: y\n", "is not YAML"),
    (b"model: a\nmodel: b\ndata: {train: x}\n", "model (line 1): is given again in line 2"),
    (b"model: a\ndata: {train: x, train: y}\n", "data.train (line 2): is given again in line 2"),
    (b"model: *missing\n", "is not YAML in line 1"),
    (b"model: !!python/object/apply:os.system ['true']\ndata: {train: x}\n", "model"),
    (b"model: !!int abc\ndata: {train: x}\n", "is not accepted"),
    (b"model: a\xff\xfe\n", "is not UTF-8 text (byte 8)"),
    ("model: a\n".encode("utf-16"), "is not UTF-8 text"),
    (b"model: a\x00b\n", "is not YAML"),
    (b"? [1, 2]\n: 3\nmodel: a\ndata: {train: x}\n", "a key that is not a word"),
    (b"model: a\n---\nmodel: b\n", "is not YAML"),
    (b"{" * 2000, "is nested too deeply"),
    (b"#" * 16_000_001, "is it a data file?"),
    (b"a: &a [*a]\n", "a (line 1): unknown key"),
    (b"rank: " + b"9" * 5000 + b"\n", "rank (line 1)"),
    (b"\x89PNG\r\n\x1a\n\x00\x00", "is not UTF-8 text"),
    (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "b"}\n', "is not YAML in line 2"),
]


@pytest.mark.parametrize(("content", "says"), TEXTS, ids=[ascii(c[:30]) for c, _ in TEXTS])
def test_a_file_that_is_no_sweep(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_bytes(content)
    assert says in plan_and_sweep(tmp_path, path)


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "yes"} for role in roles]}


DATA: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b"", "is empty"),
    ("a.jsonl", b"\n\n  \n", "is empty"),
    ("a.jsonl", lines(*ROWS) + b'{"prompt": "a", "comp', "line 3: is not valid JSON"),
    ("a.jsonl", lines(*ROWS) + b"not json\n" + lines(*ROWS), "line 3: is not valid JSON"),
    ("a.jsonl", lines(*ROWS) + b'{"prompt": "\xff", "completion": "b"}\n', "line 3: is not valid UTF-8"),
    ("a.jsonl", lines({"question": "a", "answer": "b"}), "line 1: has none of the accepted fields"),
    ("a.jsonl", lines({}), "line 1: has none of the accepted fields"),
    ("a.jsonl", lines({"prompt": "a"}), "line 1: field 'completion' is missing"),
    (
        "a.jsonl",
        lines({"prompt": "a", "completion": None}),
        "field 'completion' holds null where text is due",
    ),
    ("a.jsonl", lines({"prompt": "a", "completion": 4}), "field 'completion' holds the number 4"),
    ("a.jsonl", lines({"prompt": ["a"], "completion": "b"}), "field 'prompt' holds a list"),
    ("a.jsonl", lines({"prompt": True, "completion": "b"}), "field 'prompt' holds the truth value true"),
    ("a.jsonl", lines({"text": 1}), "field 'text' holds the number 1"),
    ("a.jsonl", lines({"text": " "}, {"text": ""}), "no row is left to train on"),
    ("a.jsonl", lines({"prompt": "a", "completion": ""}), "no row is left to train on"),
    ("a.jsonl", lines(turns("user")), "has no assistant turn"),
    (
        "a.jsonl",
        lines(turns("user", "assistant"), turns("user", "system")),
        "line 2: field 'messages' has no assistant",
    ),
    ("a.jsonl", lines({"messages": []}), "field 'messages'"),
    ("a.jsonl", lines({"messages": "hello"}), "field 'messages' holds text where a list of turns is due"),
    ("a.jsonl", lines({"messages": ["hello"]}), "messages[0] holds text where a turn"),
    ("a.jsonl", lines({"messages": [{"role": "assistant"}]}), "messages[0] has no field 'content'"),
    ("a.jsonl", lines(turns("robot", "assistant")), "messages[0].role is 'robot'"),
    ("a.jsonl", lines({"messages": [{"role": "assistant", "content": 3}]}), "holds the number 3"),
    ("a.jsonl", lines({"instruction": "a", "output": None}), "field 'output' holds null"),
    ("a.jsonl", lines(ROWS[0], [1, 2]), "line 2: holds a list where an object"),
    ("a.jsonl", lines("text"), "line 1: holds text where an object"),
    ("a.jsonl", lines(ROWS[0]) + lines(7), "line 2: holds the number 7"),
    ("a.jsonl", json.dumps(ROWS).encode()[:-10], "the JSON array is broken here"),
    ("a.json", b"[]", "no row is left to train on"),
    ("a.json", b'[{"prompt": "a", "completion": "b"} 3]', "misses a comma"),
    ("a.jsonl", "prompt".encode("utf-16"), "is UTF-16 text"),
    ("a.csv", b"", "is empty"),
    ("a.csv", b"prompt,completion\n", "no row is left to train on"),
    ("a.csv", b"prompt,completion\na,b,c\n", "line 2: has 3 cells"),
    ("a.csv", b"prompt,prompt\na,b\n", "names column 'prompt' twice"),
    ("a.csv", b'prompt,completion\n"a,b\n', "is not valid CSV"),
    ("a.csv", b"x,y\na,b\n", "line 2: has none of the accepted fields"),
    ("a.parquet", b"PAR1 not really", "is not a readable parquet file"),
    ("a.jsonl.gz", gzip.compress(lines(*ROWS), mtime=0)[:-12], "is broken or cut off"),
    ("a.jsonl.gz", lines(*ROWS), "is not compressed that way"),
    ("a.xlsx", b"PK\x03\x04", "cannot tell from its name how to read it"),
    ("a", lines(*ROWS), "cannot tell from its name how to read it"),
]


@pytest.mark.parametrize(("name", "content", "says"), DATA, ids=[ascii(c[:40]) + n for n, c, _ in DATA])
def test_a_malformed_data_file(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    sweep = write_sweep(tmp_path, data=GOOD_DATA | {"train": name})
    for said in (
        refused(tmp_path, "plan", sweep, "--devices", "cpu-16GB"),
        refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out"),
    ):
        assert says in said and name in said


@pytest.mark.parametrize("part", ["train", "eval"])
@pytest.mark.parametrize(("name", "says"), [("gone.jsonl", "no such file"), (".", "is a directory")])
def test_data_that_is_not_a_file(part: str, name: str, says: str, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, data=GOOD_DATA | {part: name})
    assert says in refused(tmp_path, "plan", sweep, "--devices", "cpu-16GB")
    assert says in refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out")


def test_a_sweep_without_held_out_rows(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, data={"train": "train.jsonl", "max_length": 16})
    assert "data.eval is missing" in refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out")


MODELS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"vision_config": {"a": 1}}, "multimodal"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised (gptq)"),
    ({"hidden_size": None}, "hidden_size must be a positive integer"),
    ({"hidden_size": "16"}, "hidden_size must be a positive integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
    ({"num_key_value_heads": 3}, "cannot share 3 key/value heads"),
    ({"hidden_act": "tanhshrink"}, "activation 'tanhshrink' is not supported"),
    ({"rope_scaling": {"rope_type": "ntk-by-parts"}}, "ntk-by-parts"),
    ({"rope_theta": "large"}, "a field is malformed: could not convert string to float: 'large'"),
    ({"layer_types": 3}, "a field is malformed"),
    ({"quantization_config": "gptq"}, "a field is malformed"),
]


@pytest.mark.parametrize(("changes", "says"), MODELS, ids=[str(c)[:40] for c, _ in MODELS])
def test_a_model_that_is_not_supported(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", **changes)
    assert says in plan_and_sweep(tmp_path, write_sweep(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'"text"'])
def test_a_config_json_that_is_not_one(content: bytes, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_bytes(content)
    assert "config.json" in plan_and_sweep(tmp_path, write_sweep(tmp_path))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert "no such directory or .gguf file" in plan_and_sweep(
        tmp_path, write_sweep(tmp_path, model="./gone")
    )
    assert "gone.gguf" in plan_and_sweep(tmp_path, write_sweep(tmp_path, model=str(tmp_path / "gone.gguf")))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    assert "bad.gguf" in plan_and_sweep(tmp_path, write_sweep(tmp_path, model="bad.gguf"))
    (tmp_path / "empty").mkdir()
    assert "config.json" in plan_and_sweep(tmp_path, write_sweep(tmp_path, model="empty"))


def test_a_model_without_weights_or_tokenizer(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    assert "safetensors" in refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    assert "tokenizer" in refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out")


def test_targets_the_model_does_not_have(tmp_path: Path) -> None:
    said = plan_and_sweep(tmp_path, write_sweep(tmp_path, train={"targets": ["qkv_proj"]}))
    assert "qkv_proj" in said and "q_proj" in said


def test_an_adapter_to_start_from_that_is_not_one(tmp_path: Path) -> None:
    said = plan_and_sweep(tmp_path, write_sweep(tmp_path, search=None, train={"init_adapter": "gone"}))
    assert "gone: not a PEFT adapter: adapter_config.json is missing" in said


def test_training_rows_of_one_job_that_are_missing(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, search={"train": ["train.jsonl", "gone.jsonl"]})
    assert "gone.jsonl: no such file" in refused(tmp_path, "plan", sweep)
    assert "gone.jsonl: no such file" in refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out")


def test_a_directory_already_used(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    (tmp_path / "out").mkdir()
    write_rows(tmp_path / "out" / "something.txt")
    assert "already used" in refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out")
    assert "this is a file" in refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out" / "something.txt")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precision": "nf4"}, "precision.base: nf4 can be planned but not trained yet"),
    ],
)
def test_what_can_be_planned_but_not_run(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, **changes)
    assert says in refused(tmp_path, "sweep", sweep, "--out", tmp_path / "out")
    assert run("plan", sweep, "--devices", "cpu-16GB") == (0, "")


COMMANDS: list[tuple[list[str], str]] = [
    ([], "COMMAND"),
    (["train"], "invalid choice: 'train'"),
    (["sweep"], "SWEEP.yaml"),
    (["plan"], "SWEEP.yaml"),
    (["plan", "gone.yaml"], "gone.yaml: no such file"),
    (["plan", "."], "is a directory; give a YAML file"),
    (["sweep", "gone.yaml", "--out", "out"], "gone.yaml: no such file"),
    (["sweep", "sweep.yaml", "--output", "x"], "--output"),
    (["plan", "sweep.yaml", "--devices", "8xTPUv5"], "'TPUv5' is not known"),
    (["plan", "sweep.yaml", "--devices", "0xH100"], "count must be between 1"),
    (["plan", "sweep.yaml", "--devices", "many"], "is not known"),
    (["plan", "sweep.yaml", "--json", "no/such/dir/plan.json"], "cannot be written: no/such"),
    (["plan", "sweep.yaml", "--json", "/proc/plan.json"], "cannot be written: /proc"),
    (["plan", "sweep.yaml", "--svg", "model"], "model is a directory; name a file"),
    (["plan", "sweep.yaml", "--rows", "0"], "'0' is not a whole number of at least 1"),
    (["plan", "sweep.yaml", "--rows", "many"], "'many' is not a whole number"),
    (["plan", "sweep.yaml", "--cost-model", "gone.json"], "cost model gone.json"),
    (["plan", "sweep.yaml", "--cost-model", "sweep.yaml"], "not JSON"),
    (["eval", "--model", "model"], "--data"),
    (
        ["eval", "--model", "model", "--adapter", "gone", "--data", "eval.jsonl"],
        "no adapter_config.json there",
    ),
    (
        ["eval", "--model", "model", "--data", "eval.jsonl", "--json", "no/such/x.json"],
        "cannot be written: no/such",
    ),
    (["eval", "--model", "model", "--data", "gone.jsonl"], "gone.jsonl: no such file"),
    (["eval", "--model", "model", "--data", "sweep.yaml"], "cannot tell from its name how to read it"),
    (
        ["eval", "--model", "model", "--data", "eval.jsonl", "--metric", "accuracy"],
        "--metric accuracy: allowed are",
    ),
    (
        ["eval", "--model", "model", "--data", "eval.jsonl", "--max-length", "-1"],
        "not a whole number of at least 1",
    ),
    (["eval", "--model", "gone", "--data", "eval.jsonl"], "model 'gone': no such directory"),
    (["eval", "--model", "model", "--data", "eval.jsonl"], "safetensors"),
    (["merge", "gone"], "--out"),
    (["merge", "gone", "--out", "new"], "not a PEFT adapter"),
    (["merge", "gone", "--out", "new", "--dtype", "int8"], "invalid choice: 'int8'"),
]


@pytest.mark.parametrize(
    ("argv", "says"), COMMANDS, ids=[" ".join(argv) or "nothing" for argv, _ in COMMANDS]
)
def test_a_command_line_that_is_wrong(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sweep(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert says in refused(tmp_path, *argv)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_sweep_that_may_not_be_read(tmp_path: Path) -> None:
    path = write_sweep(tmp_path)
    path.chmod(0)
    assert "cannot be read" in refused(tmp_path, "plan", path)


def test_the_good_sweep_is_good(tmp_path: Path) -> None:
    """What all the cases above start from is accepted, so that each is refused for its own fault."""
    sweep = write_sweep(tmp_path)
    assert run("plan", sweep, "--devices", "cpu-16GB", "--json", tmp_path / "plan.json") == (0, "")
    assert len(json.loads((tmp_path / "plan.json").read_text())["jobs"]) == 4
    assert CONFIG["model_type"] == "llama"
