"""The protocol page's JavaScript of the Gumbel noise, in Node."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from moa_runtime.drafters.gumbel import gumbel_of
from unit.runtime.test_gumbel import PAGE, ROWS


@pytest.mark.skipif(shutil.which("node") is None, reason="runs JavaScript, and there is no node")
def test_the_javascript_of_the_protocol_s_page():
    (program,) = (
        each for each in re.findall(r"```js\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if "threefry" in each
    )
    calls = "\n".join(f"console.log(noise({seed}n, {position}n, {token}));" for seed, position, token, *_ in ROWS)
    done = subprocess.run(["node", "-e", program + calls], capture_output=True, text=True, check=True, timeout=60)
    assert [float(line) for line in done.stdout.split()] == pytest.approx(
        [gumbel_of(int(seed), int(position), int(token)) for seed, position, token, *_ in ROWS], abs=1e-12
    )
