import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--texts=0"], "--texts is 0, but must be at least 1"),
        (["--lengths=256,abc"], "--lengths has 'abc', but"),
        (["--selections=16:0"], "--selections has '16:0', but must have values like 16:0:7"),
        (["--teacher_forced", "--max_new_tokens=14"], "--max_new_tokens is 14, but must be at "),
    ],
)
def test_a_bad_flag_is_one_sentence(flags, message):
    command = [sys.executable, "-m", "benchmarks.context", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
