"""The chain of words of `tiny_gguf.py` as a folder in the format that vLLM and SGLang read, written with numpy alone.

    any prompt -> " w000" -> " w001" -> ... -> " w063" -> </s>

What `tiny_gguf.py` says of the numbers holds here too. A prompt is cut into bytes, a word is one token, and the chat
template is ChatML. There are no adapters.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = 64
CONTEXT_TOKENS = 2048
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 128, 2, 2, 1, 64
_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_BOS, _EOS = 1, 2
_SPACE = "\u0120"
"""What stands for a space in a tokenizer that works on bytes."""

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Rows = NDArray[np.float32]


def make(folder: Path) -> Path:
    """Write the model into `folder`, which is made; about 1.5 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary()
    _write(folder / "tokenizer.json", _tokenizer(vocabulary))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": _CHATML,
            "model_max_length": CONTEXT_TOKENS,
        },
    )
    _write(folder / "generation_config.json", {"bos_token_id": _BOS, "eos_token_id": _EOS})
    _write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": _HIDDEN,
            "intermediate_size": 2 * _HIDDEN,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HEAD,
            "vocab_size": len(vocabulary),
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": _BOS,
            "eos_token_id": _EOS,
        },
    )
    _write_tensors(folder / "model.safetensors", _tensors(len(vocabulary), vocabulary[f"{_SPACE}w000"]))
    return folder


def _vocabulary() -> dict[str, int]:
    tokens = [*_SPECIAL, *_byte_letters(), *(f"{_SPACE}w{number:03d}" for number in range(WORDS))]
    # Engines pad what is no multiple of 64, and then answer for tokens that the tokenizer does not have.
    tokens += [f"<unused{number}>" for number in range(-len(tokens) % 64)]
    return {token: number for number, token in enumerate(tokens)}


def _byte_letters() -> list[str]:
    """The letter for each byte: its own where that is printable, else the next one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, Any]:
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[token], "content": token, **plain} for token in _SPECIAL],
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "post_processor": None,
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _tensors(tokens: int, first_word: int) -> dict[str, Rows]:
    rng = np.random.default_rng(1)
    embedding = rng.standard_normal((tokens, _HIDDEN)).astype(np.float32)
    embedding[:, 0] = 0
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    embedding[:, 0] = 0.5
    output = np.zeros((tokens, _HIDDEN), np.float32)
    for number in range(WORDS):
        follower = first_word + number + 1 if number + 1 < WORDS else _EOS
        output[follower, 1:] = embedding[first_word + number, 1:] * 12
    output[first_word, 0] = 15

    def noise(rows: int, columns: int) -> Rows:
        return (rng.standard_normal((rows, columns)) * (0.02 / columns**0.5)).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    made = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones, "lm_head.weight": output}
    for layer in range(_LAYERS):
        shapes = {
            "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN),
            "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN),
            "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
            "mlp.gate_proj": (2 * _HIDDEN, _HIDDEN),
            "mlp.up_proj": (2 * _HIDDEN, _HIDDEN),
            "mlp.down_proj": (_HIDDEN, 2 * _HIDDEN),
        }
        prefix = f"model.layers.{layer}."
        made |= {f"{prefix}{norm}.weight": ones for norm in ("input_layernorm", "post_attention_layernorm")}
        made |= {f"{prefix}{name}.weight": noise(*shape) for name, shape in shapes.items()}
    return made


def _write_tensors(path: Path, tensors: dict[str, Rows]) -> None:
    """A safetensors file: the length of the head, the head in JSON, and all numbers one after the other."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, rows in tensors.items():
        head[name] = {"dtype": "F32", "shape": list(rows.shape), "data_offsets": [at, at + rows.nbytes]}
        at += rows.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for rows in tensors.values():
            file.write(rows.astype("<f4").tobytes())


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))
