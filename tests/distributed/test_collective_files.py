"""Tests the shards of hosts, and samples that are sent from one host to another."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from app.distributed.collective_files import (
    decode_gathered_sample,
    host_slice,
    per_host_path,
    sample_json_lines,
    write_collectively,
)
from app.distributed.collectives import error_barrier, iterate_in_lockstep
from app.records.sample_json import sample_to_record
from settings import InputError
from tests.program import records_of
from tests.tiny import make_sample


@pytest.mark.parametrize("runs", [["012345"], ["012", "345"], ["012", "34", "56"], ["0", "1", ""]])
def test_host_slices_differ_by_at_most_one_sample_and_go_to_separate_files(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: len(runs))
    for host, run in enumerate(runs):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        assert "".join(map(str, host_slice(len("".join(runs))))) == run
        own = "out.jsonl" if len(runs) == 1 else f"out.jsonl.host_{host}_of_{len(runs)}"
        assert per_host_path(Path("a/out.jsonl.log")) == Path(f"a/{own}.log")


def test_gathered_samples_keep_nan_and_infinite_values() -> None:
    sample = make_sample([3, 4], group_id=1, sample_index=0, reward=1.0)
    nan, infinite = np.array([-0.5, np.nan], np.float32), np.array([0.1, -np.inf, 2.0], np.float32)
    sample = replace(sample, behavior_logprobs=nan, values=infinite)
    came = decode_gathered_sample(json.loads(json.dumps(sample_to_record(sample))))
    np.testing.assert_array_equal(came.behavior_logprobs, nan)
    np.testing.assert_array_equal(came.values, infinite)
    assert (came.uid, came.reward, came.policy_logprobs) == (sample.uid, 1.0, None)


def test_write_collectively_keeps_the_order_and_raises_errors(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    samples = [make_sample([3], group_id=i, sample_index=0) for i in range(3)]
    write_collectively(
        out, iterate_in_lockstep(sample_json_lines(part, path=out) for part in (samples[:2], [], samples[2:]))
    )
    assert [record["group_id"] for record in records_of(out)] == [0, 1, 2]
    broken = replace(samples[0], behavior_logprobs=np.array([np.nan], np.float32))
    with pytest.raises(ValueError, match=rf"out\.jsonl \({broken.uid}\)"):
        write_collectively(out, [sample_json_lines([*samples[:2], broken], path=out)])
    assert len(records_of(out)) == 3
    with pytest.raises(InputError, match="mine"), error_barrier():
        raise InputError("mine")


def test_a_single_host_holds_one_line_of_a_file_in_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    write_collectively(tmp_path / "out.jsonl", [(b"x" * 2**20 for _ in range(32))])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20
