"""What needs no extra: a short file of texts is trained on where only the package's own dependencies are installed."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import WITH_PACKAGE, printed_by
from tiny_models import save_target


SCRIPT = """
import sys
for name in ("datasets", "pyarrow"):
    sys.modules[name] = None
import torch
torch.set_num_threads(1)
from dflash.training import TrainingSettings, train_drafter
settings = TrainingSettings(num_hidden_layers=1, block_size=4, batch_tokens=64, held_out=1, eval_new_tokens=4, steps=1)
record = train_drafter("target", "answers.jsonl", "drafter", settings, show_progress=False)
print(len(record.curve))
"""


def test_a_short_file_is_trained_on_without_extras(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    rows = [{"prompt_ids": [5, 6, 7 + i], "response_ids": [20 + i, *range(30, 44), 8]} for i in range(12)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    printed = printed_by(SCRIPT, tmp_path, path=WITH_PACKAGE, variables={"OMP_NUM_THREADS": "1"})
    assert printed.split()[-1].isdigit()
