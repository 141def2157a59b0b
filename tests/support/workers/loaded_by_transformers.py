"""`python loaded_by_transformers.py FOLDER EOS ...`: prints as JSON what transformers makes of each exported
folder. Imports nothing of this project, because another version of transformers runs it."""

import hashlib
import json
import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

TEXT = "the cat é sat"
AFTER = 3  # new tokens before the text ends


class EndsThere(LogitsProcessor):
    """Makes an id certain after `AFTER` new tokens, and impossible before."""

    def __init__(self, eos: int, prompt: int) -> None:
        self.eos, self.prompt = eos, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos] = 1e9 if input_ids.shape[1] >= self.prompt + AFTER else -1e9
        return scores


def look(folder: str, eos: int) -> dict[str, Any]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT).input_ids
    prompt = torch.tensor([ids])
    tokens = torch.arange(60)[None] * 7 % model.config.vocab_size
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=eos,
        logits_processor=[EndsThere(eos, len(ids))],
    )
    return {
        "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "shape": list(logits.shape),
        "ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "special": [tokenizer.bos_token, tokenizer.eos_token],
        "added": made.shape[1] - len(ids),
        "bos": model.generation_config.bos_token_id,
        "eos": model.generation_config.eos_token_id,
        "use_cache": model.config.use_cache,
        "strange": [str(found) for kind, found in info.items() if found and kind != "error_msgs"],
    }


if __name__ == "__main__":
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    seen = {folder: look(folder, int(eos)) for folder, eos in pairs}
    print(json.dumps({"version": transformers.__version__, "seen": seen}))
