"""Real rows: padding and throughput of the loader on GSM8K, and every task file read as it is.

Skipped unless PLORA_TASKS names the directory of task files.
"""

import json
import os
import time
from itertools import islice
from pathlib import Path

import pytest

from plora_jax.data.choices import make_choices
from plora_jax.data.encode import read_examples
from plora_jax.data.examples import overlap
from plora_jax.data.layout import Cursor, Slot
from plora_jax.data.loader import PackLoader
from plora_jax.data.shapes import MAX_SHAPES, choose_shapes
from tests.data.conftest import make_tokenizer

TASKS = Path(os.environ.get("PLORA_TASKS", ""))
pytestmark = pytest.mark.skipif(
    "PLORA_TASKS" not in os.environ, reason="PLORA_TASKS is not set: no task data"
)
ROWS = 2_500  # of GSM8K's 7,473: enough for the distribution of lengths
# Measured for Qwen2.5-0.5B on one H200 at 32 jobs × 1 × 1,024, no recompute: tokens/s of the whole step.
STEP_OF_HALF_A_BILLION = 108_259


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory):
    """Tokenise GSM8K rows with a BPE of 8,000 tokens trained on them: lengths like those of a real tokenizer."""
    path = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    with (TASKS / "gsm8k_train.jsonl").open(encoding="utf-8") as lines:
        path.write_text("".join(islice(lines, ROWS)), encoding="utf-8")
    texts = [t["content"] for line in path.open(encoding="utf-8") for t in json.loads(line)["messages"]]
    return read_examples(path, make_tokenizer(corpus=texts, size=8_000), max_length=1024)


def measure(examples, batch_sizes, m, *, group, fill, starts=None, steps=250):
    """Return (padding share, real tokens a second of processor time) over `steps` micro-steps."""
    shapes = choose_shapes([(examples, 0)], m, group=group, fill=fill, refill=starts is not None)
    assert len(shapes) <= MAX_SHAPES
    slots = [Slot(examples, b, 0, 10**6) for b in batch_sizes]
    cursors = [Cursor(0, s, 0) for s in starts] if starts else None
    loader = PackLoader(slots, m, shapes, group=group, fill=fill, cursors=cursors)
    start = time.process_time()
    for _ in islice(loader, steps):
        pass
    spent = time.process_time() - start
    loader.close()
    speed = loader.filled.real / spent
    print(
        f"{batch_sizes} m={m} group={group} fill={fill}: {loader.filled.padded:.1%} padding, {speed:,.0f} tokens/s"
    )
    return loader.filled.padded, speed


MIXED = [1, 2, 4, 8] * 2
APART = [i * ROWS // 8 // 8 * 8 for i in range(8)]  # every slot somewhere else in the epoch


@pytest.mark.parametrize(
    ("batch_sizes", "m", "group", "fill"),
    [
        (MIXED, 1, 1, False),
        ([2, 4, 8, 8], 1, 2, True),
        ([4, 8] * 4, 1, 4, True),
        ([8] * 8, 1, 8, True),
        ([8] * 8, 2, 8, True),
    ],
)
def test_padding_in_lockstep_is_at_most_five_percent(gsm8k, batch_sizes, m, group, fill):
    assert measure(gsm8k, batch_sizes, m, group=group, fill=fill)[0] <= 0.05


@pytest.mark.parametrize(
    ("batch_sizes", "group", "starts"),
    [
        (MIXED, 1, [0] * 7 + [800]),  # one slot refilled
        ([1] * 8, 1, [0] * 7 + [800]),
        ([4, 8] * 4, 4, APART),  # all refilled, each at another time
        ([8] * 8, 8, APART),
        ([8] * 8, 1, APART),
    ],
)
def test_padding_after_refill_is_at_most_twenty_percent(gsm8k, batch_sizes, group, starts):
    assert measure(gsm8k, batch_sizes, 1, group=group, fill=True, starts=starts)[0] <= 0.20


@pytest.mark.parametrize(("batch_sizes", "m", "group"), [([1] * 8, 1, 1), (MIXED, 1, 1), ([8] * 8, 2, 8)])
def test_where_all_slots_are_apart_and_little_can_be_chosen_from_padding_is_more(
    gsm8k, batch_sizes, m, group
):
    # a slot of batch size 1 has one example a micro-step, and the longest of the slots' sets S: known, and told
    padded = measure(gsm8k, batch_sizes, m, group=group, fill=True, starts=APART)[0]
    assert padded < 0.45


@pytest.mark.parametrize(
    ("group", "fill", "starts"), [(1, False, None), (1, True, [i * ROWS // 32 for i in range(32)])]
)
def test_the_loader_is_five_times_as_fast_as_a_step_consumes(gsm8k, group, fill, starts):
    # the loader's thread is one of the two cores; processor time, so that a busy machine does not fail it
    speed = measure(gsm8k, [1] * 32, 1, group=group, fill=fill, starts=starts, steps=150)[1]
    assert speed >= 5 * STEP_OF_HALF_A_BILLION


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [("cola_dev", 1043, 2), ("wnli_dev", 71, 2), ("mrpc_test", 1725, 2), ("banking77_test", 3080, 77)],
)
def test_task_files_are_read_as_they_are(name, rows, options, chatml):
    examples = read_examples(TASKS / f"{name}.jsonl", chatml, max_length=1024)
    assert len(examples) == rows == examples.report.rows and overlap(examples, examples).startswith(
        f"{rows:,} of"
    )
    if options == 2:
        choices = make_choices(examples, chatml, train=examples)
        assert len(choices.sequences) == rows and {len(o) for o in choices.options} == {options}
        assert (
            choices.correct
            == [o.index(s.completion) for o, s in zip(choices.options, examples.sources, strict=True)]
        ).all()
