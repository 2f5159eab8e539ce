"""Trains a target of another family for `recipes.py`: a Gemma 3 of about 1 M parameters, with sliding windows, that writes plays.

    python benchmarks/play_target.py --text tinyshakespeare/input.txt --output play-target

The text is public domain (karpathy/char-rnn). It takes about ten minutes on two CPU cores.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


PAD, END, MASK = "<pad>", "<end>", "<mask>"
VOCABULARY, CHUNK = 1024, 256


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges learned on `text`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how: dict[str, Any] = {"special_tokens": [PAD, END, MASK], "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(text.split("\n\n"), trainers.BpeTrainer(vocab_size=VOCABULARY, **how))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=END, mask_token=MASK)


def new_target(tokenizer: PreTrainedTokenizerFast) -> Gemma3ForCausalLM:
    """The Gemma 3, of random weights."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
    kinds = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    length = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    config = Gemma3TextConfig(**shape, **heads, **kinds, **ids, **length, attn_implementation="sdpa")
    return Gemma3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="plays, scenes divided by empty lines")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args()
    set_seed(0)
    text = args.text.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    chunks = ids[: len(ids) // CHUNK * CHUNK].view(-1, CHUNK)
    rows: Any = [{"input_ids": chunk, "labels": chunk} for chunk in chunks]
    settings = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=args.steps // 20,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
        weight_decay=0.1,
        save_strategy="no",
        report_to="none",
        logging_steps=100,
        seed=0,
    )
    target = new_target(tokenizer)
    Trainer(target, settings, data_collator=default_data_collator, train_dataset=rows).train()
    target.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
