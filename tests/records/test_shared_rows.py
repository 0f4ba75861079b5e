import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.records.shared_rows import SharedRows, share_rows
from settings.errors import InputError

TESTS = {"tests": "assert f(1) == 2\n" * 30}


def restored(records):
    rows = SharedRows()
    return [rows.restore(record, where=f"s.jsonl:{line}") for line, record in enumerate(records, 1)]


@given(
    st.lists(
        st.fixed_dictionaries(
            {"uid": st.builds("{}/s{}".format, st.sampled_from("ab"), st.integers(0, 2))},
            optional={
                "answer": st.sampled_from([None, "4", "4" * 300, ["4" * 300], 4]),
                "columns": st.sampled_from([{}, TESTS, *({**TESTS, "level": x} for x in (1, True, 1.0, math.nan))]),
                "note": st.just("unknown"),
            },
        )
    )
)
def test_every_record_is_restored_from_shared_rows(records):
    shared = json.loads(json.dumps([*share_rows(records)]))
    assert json.dumps(restored(shared), sort_keys=True) == json.dumps(records, sort_keys=True)


def test_long_fields_are_stored_only_in_the_first_sample_of_a_prompt():
    records = [{"uid": f"{prompt}/s{i}", "answer": "4", "columns": TESTS} for prompt in "ab" for i in range(3)]
    shared = [*share_rows(records)]
    assert [record.get("row_of") for record in shared] == [None, "a/s0", "a/s0", None, "b/s0", "b/s0"]
    assert ["columns" in record for record in shared] == [True, False, False] * 2
    assert {record["answer"] for record in shared} == {"4"}


@pytest.mark.parametrize("holder", ["a/s0", 7])
def test_a_sample_is_refused_if_the_line_with_its_row_is_missing(holder):
    with pytest.raises(InputError, match=r"s.jsonl:1: row_of: no earlier line has the sample .*; keep that line"):
        restored([{"uid": "a/s1", "row_of": holder}])
