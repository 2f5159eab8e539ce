"""The tiny pair's tokenizer: byte-level BPE with a token per digit, and a Qwen-style chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"

# Words take their leading space along; digits and line ends stand alone; the calculator's marks stay apart from words.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer for any text, with merges learned on `texts`; `<|mask|>` never comes out of text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, MASK],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=1024,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves a form that transformers 4.57 and 5.x both load: the class by its common name, the template beside."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # 5.x calls the list of further tokens `extra_special_tokens`, which 4.57 takes for a dict of names: both read this key.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START, MASK],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    path.write_text(json.dumps(settings, indent=2) + "\n")
