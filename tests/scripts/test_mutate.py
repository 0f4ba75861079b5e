"""Tests of the faults that `scripts/mutate.py` finds in a source."""

from scripts.mutate import find_faults

SOURCE = '''\
def f(xs: Shape["2 N"], policy_ids, reference_ids, *, keep: bool = True) -> Literal["policy"]:
    """Returns 1 - 2."""
    for x in xs[n:1]:
        if not x <= -n or f"{x + 1}" == policy_ids:
            continue
    log("ä"); return min(policy_ids, 3 * 0.5)
'''
EXPECTED = {
    1: ["keep: bool = False)"],
    3: ["xs[(n + 1):1]", "xs[n:0]", "xs[n:2]"],
    4: ["if (x <= -n)", "(x < -n)", "<= (n)", "!= policy_ids", "== reference_ids", " and "],
    5: ["break"],
    6: ["pass; return", "return None", "return max(", "min(reference_ids", "4 * 0.5", "3 * 1.5", "3 / 0.5"],
}
"""What the changed lines hold."""


def test_faults_are_those_of_the_program_and_each_compiles() -> None:
    source = SOURCE.encode()
    faults = find_faults(source, package="p", file="f.py")
    for fault in faults:
        compile(fault.apply(source), "f.py", "exec")
        assert fault.apply(source) != source
    found = {line: [fault.after for fault in faults if fault.line == line] for line in {fault.line for fault in faults}}
    assert found.keys() == EXPECTED.keys()
    for line, texts in EXPECTED.items():
        assert len(found[line]) == len(texts)
        for text in texts:
            assert [text in after for after in found[line]].count(True) == 1, (text, found[line])
