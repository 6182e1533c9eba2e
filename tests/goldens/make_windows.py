"""Make the goldens of sliding windows with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_windows.py`. It rewrites `text/windows/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import make_text
import numpy as np
import torch
from make_text import build_model, rope

WINDOW, STEPS = 5, 6
SWITCHED = {"use_sliding_window": True, "sliding_window": WINDOW, **rope(1e2)}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 16, **rope(1e2)}),
    "qwen2": ("Qwen2", {**SWITCHED, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**SWITCHED, "head_dim": 24, "layer_types": KINDS}),
}


def main() -> None:
    torch.set_num_threads(1)
    make_text.OUT = Path(__file__).parent / "text" / "windows"
    make_text.OUT.mkdir(exist_ok=True)
    for family, (name, more) in FAMILIES.items():
        model = build_model(family, name, more)
        input_ids = torch.tensor([(np.arange(14) * 37 + 11) % 290 + 3])
        with torch.no_grad():
            whole = model(input_ids=input_ids).logits[0]
            answer = model.generate(input_ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
        arrays = {
            "input_ids": input_ids[0].numpy().astype(np.int32),
            "logits": whole.numpy(),
            "generated": answer[0, input_ids.shape[1] :].numpy().astype(np.int32),
        }
        np.savez_compressed(make_text.OUT / f"{family}.npz", **arrays)
        print(f"{family:>18} {(make_text.OUT / f'{family}.npz').stat().st_size / 1024:6.1f} KiB")


if __name__ == "__main__":
    main()
