"""The example of docs/sandboxes.md runs as it stands, but for the kind of sandbox and the directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "sandboxes.md"


def test_the_documented_sandbox_answers(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(import asyncio.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert 'kind="apptainer"' in code and "/tmp/my-sandboxes" in code
    code = code.replace('kind="apptainer"', 'kind="local"').replace("/tmp/my-sandboxes", str(tmp_path / "s"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("hello from /") and done.stdout.rstrip().endswith("0"), done
    assert list((tmp_path / "s").iterdir()) == []
