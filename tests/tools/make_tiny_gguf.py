#!/usr/bin/env python3
"""Make a tiny llama GGUF with random weights and odd sizes, for tests that need no language.

The same arguments give the same bytes on every machine and with every Python from 3.9 on: weights
come from integers of the Mersenne twister and IEEE operations alone, no libm.  Standard library only.

    make_tiny_gguf.py OUT.gguf [--type q4_1] [--tokenizer gpt2|llama] [--untied] [--rope-freqs] ...
"""

import argparse
import math
import os
import random
import struct

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny model made of random numbers<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Merges are learnt from this.
TEXT = (
    "the quick brown fox jumps over the lazy dog while the other dogs sleep in the shade of the "
    "old tree and then there is nothing more to tell about them because they were tired after all "
    "the running around in the hot sun that shone on the hills and the river on the other side"
)


# ---- Tensor types: a list of floats to the file's bytes ----


def f16(x):
    return struct.pack("<e", x)


def as_f16(x):
    return struct.unpack("<e", f16(x))[0]


def nearest(x):
    """Nearest integer, halves up."""
    return math.floor(x + 0.5)


def blocks(w):
    return (w[i : i + 32] for i in range(0, len(w), 32))


def nibbles(q):
    return bytes(q[i] | q[i + 16] << 4 for i in range(16))


def encode_f32(w):
    return struct.pack("<%df" % len(w), *w)


def encode_f16(w):
    return struct.pack("<%de" % len(w), *w)


def encode_bf16(w):
    out = bytearray()
    for (u,) in struct.iter_unpack("<I", encode_f32(w)):
        out += struct.pack("<H", (u + 0x7FFF + (u >> 16 & 1)) >> 16)
    return bytes(out)


def encode_q8_0(w):
    out = bytearray()
    for b in blocks(w):
        d = as_f16(max(abs(x) for x in b) / 127)
        inv = 1 / d if d else 0.0
        out += f16(d) + bytes(max(-128, min(127, nearest(x * inv))) & 255 for x in b)
    return bytes(out)


def encode_q4_0(w):
    out = bytearray()
    for b in blocks(w):
        d = as_f16(max(b, key=abs) / -8)
        inv = 1 / d if d else 0.0
        out += f16(d) + nibbles([max(0, min(15, nearest(x * inv) + 8)) for x in b])
    return bytes(out)


def encode_q4_1(w):
    out = bytearray()
    for b in blocks(w):
        m = as_f16(min(b))
        d = as_f16((max(b) - min(b)) / 15)
        inv = 1 / d if d else 0.0
        out += f16(d) + f16(m) + nibbles([max(0, min(15, nearest((x - m) * inv))) for x in b])
    return bytes(out)


# name: (type id, general.file_type, encoder)
TYPES = {
    "f32": (0, 0, encode_f32),
    "f16": (1, 1, encode_f16),
    "q4_0": (2, 2, encode_q4_0),
    "q4_1": (3, 3, encode_q4_1),
    "q8_0": (8, 7, encode_q8_0),
    "bf16": (30, 32, encode_bf16),
}


# ---- Container ----


def string(s):
    b = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(b)) + b


def value(kind, v):
    if kind == STRING:
        return string(v)
    if kind == ARRAY:
        item, items = v
        return struct.pack("<IQ", item, len(items)) + b"".join(value(item, x) for x in items)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], v)


def gguf(kv, tensors, version, alignment):
    """tensors: (name, dims with the contiguous one first, type id, bytes)"""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(kv))
    for key, kind, v in kv:
        head += string(key) + struct.pack("<I", kind) + value(kind, v)
    data = bytearray()
    for name, dims, type_id, content in tensors:
        head += string(name) + struct.pack("<I", len(dims))
        head += struct.pack("<%dQ" % len(dims), *dims) + struct.pack("<IQ", type_id, len(data))
        data += content + bytes(-len(content) % alignment)
    return head + bytes(-len(head) % alignment) + data


# ---- Vocabularies ----


def byte_letters():
    """The printable stand-ins that byte-level BPE writes bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = {}, 256
    for b in range(256):
        letters[b] = chr(b) if b in printable else chr(spare)
        spare += b not in printable
    return letters


def learn_merges(words, n):
    """Byte-pair merges of the most frequent pair, ties to the smaller one."""
    merges = []
    for _ in range(n):
        counts = {}
        for w in words:
            for pair in zip(w, w[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda p: (-counts[p], p))
        merges.append(best)
        for k, w in enumerate(words):
            out = []
            for piece in w:
                if out and (out[-1], piece) == best:
                    out[-1] += piece
                else:
                    out.append(piece)
            words[k] = out
    return merges


def vocab_gpt2(n_merges):
    letters = byte_letters()
    words = [[letters[b] for b in w.encode()] for w in TEXT.replace(" ", "\n ").split("\n")]
    merges = learn_merges(words, n_merges)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = control + [letters[b] for b in range(256)] + [a + b for a, b in merges]
    types = [CONTROL] * len(control) + [NORMAL] * (len(tokens) - len(control))
    kv = [
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "smollm"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (I32, types)),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [a + " " + b for a, b in merges])),
        ("tokenizer.ggml.bos_token_id", U32, 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.unknown_token_id", U32, 0),
        ("tokenizer.ggml.padding_token_id", U32, 2),
        ("tokenizer.ggml.add_space_prefix", BOOL, False),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.chat_template", STRING, TEMPLATE),
    ]
    return kv, types


def vocab_llama(n_merges):
    words = [list("\u2581" + w) for w in TEXT.split()]
    chars = sorted({c for w in words for c in w})
    merges = learn_merges(words, n_merges)
    pieces = [a + b for a, b in merges] + chars
    tokens = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)] + pieces
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [0.0] * 259 + [float(-i) for i in range(len(pieces))]
    kv = [
        ("tokenizer.ggml.model", STRING, "llama"),
        ("tokenizer.ggml.pre", STRING, "default"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.scores", ARRAY, (F32, scores)),
        ("tokenizer.ggml.token_type", ARRAY, (I32, types)),
        ("tokenizer.ggml.bos_token_id", U32, 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.unknown_token_id", U32, 0),
        ("tokenizer.ggml.add_bos_token", BOOL, True),
    ]
    return kv, types


# ---- Weights ----


def bell(rng, n, scale):
    """n values of a bell curve (four dice) with standard deviation scale."""
    out = []
    for _ in range(n):
        u = rng.getrandbits(64)
        s = (u & 65535) + (u >> 16 & 65535) + (u >> 32 & 65535) + (u >> 48) - 131070
        out.append(s * scale / 37837.0)  # 65536 / sqrt(3)
    return out


def make_tensors(a, types):
    rng = random.Random(a.seed)
    n_vocab, tensors = len(types), []
    q_dim, kv_dim = a.heads * a.head_dim, a.kv_heads * a.head_dim
    # Heads of Q4 files are Q8_0, as quantizers make them.
    head_type = "q8_0" if a.type.startswith("q4") else a.type

    def add(name, kind, dims, weights):
        type_id, _, encode = TYPES[kind]
        tensors.append((name, dims, type_id, encode(weights)))

    def matrix(name, rows, cols, gain=1.0):
        add(name, a.type, [cols, rows], bell(rng, rows * cols, gain / math.sqrt(cols)))

    def vocab_matrix(name):
        """Control tokens get short rows: nothing is drawn to them, so generation goes on."""
        w = bell(rng, n_vocab * a.embd, 0.5)
        for i, t in enumerate(types):
            if t in (CONTROL, UNKNOWN):
                row = slice(i * a.embd, (i + 1) * a.embd)
                w[row] = [x * 0.02 for x in w[row]]
        add(name, head_type, [a.embd, n_vocab], w)

    def norm(name, mean, spread):
        add(name, "f32", [a.embd], [mean + x for x in bell(rng, a.embd, spread)])

    vocab_matrix("token_embd.weight")
    for i in range(a.layers):
        norm("blk.%d.attn_norm.weight" % i, 1.0, 0.2)
        matrix("blk.%d.attn_q.weight" % i, q_dim, a.embd, 1.5)
        matrix("blk.%d.attn_k.weight" % i, kv_dim, a.embd, 1.5)
        matrix("blk.%d.attn_v.weight" % i, kv_dim, a.embd)
        matrix("blk.%d.attn_output.weight" % i, a.embd, q_dim, 2.0)
        norm("blk.%d.ffn_norm.weight" % i, 1.0, 0.2)
        matrix("blk.%d.ffn_gate.weight" % i, a.ff, a.embd)
        matrix("blk.%d.ffn_up.weight" % i, a.ff, a.embd)
        matrix("blk.%d.ffn_down.weight" % i, a.embd, a.ff, 2.0)
    # Of both signs: with a tied head a token would otherwise mostly predict itself.
    norm("output_norm.weight", 0.0, 1.0)
    if a.untied:
        vocab_matrix("output.weight")
    if a.rope_freqs:
        n = a.head_dim // 2
        add("rope_freqs.weight", "f32", [n], [1.0 + i / n for i in range(n)])
    return tensors


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("out")
    p.add_argument("--type", choices=sorted(TYPES), default="f32")
    p.add_argument("--tokenizer", choices=("gpt2", "llama"), default="gpt2")
    p.add_argument("--untied", action="store_true", help="an output head of its own")
    p.add_argument("--rope-freqs", action="store_true", help="add rope_freqs.weight")
    p.add_argument("--rope-factor", type=float, default=0, help="linear rope scaling")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--embd", type=int, default=96)
    p.add_argument("--heads", type=int, default=6)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=16)
    p.add_argument("--ff", type=int, default=160)
    p.add_argument("--merges", type=int, default=50)
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--version", type=int, choices=(2, 3), default=3)
    p.add_argument("--alignment", type=int, default=32)
    a = p.parse_args()

    vocab_kv, types = (vocab_gpt2 if a.tokenizer == "gpt2" else vocab_llama)(a.merges)
    kv = [
        ("general.architecture", STRING, "llama"),
        ("general.type", STRING, "model"),
        ("general.name", STRING, "tiny %s" % a.type),
        ("general.file_type", U32, TYPES[a.type][1]),
        ("general.quantization_version", U32, 2),
        ("llama.block_count", U32, a.layers),
        ("llama.context_length", U32, a.context),
        ("llama.embedding_length", U32, a.embd),
        ("llama.feed_forward_length", U32, a.ff),
        ("llama.attention.head_count", U32, a.heads),
        ("llama.attention.head_count_kv", U32, a.kv_heads),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("llama.rope.freq_base", F32, 10000.0),
        ("llama.rope.dimension_count", U32, a.head_dim),
        ("llama.vocab_size", U32, len(types)),
    ]
    if a.heads * a.head_dim != a.embd:
        kv.append(("llama.attention.key_length", U32, a.head_dim))
        kv.append(("llama.attention.value_length", U32, a.head_dim))
    if a.rope_factor:
        kv.append(("llama.rope.scaling.type", STRING, "linear"))
        kv.append(("llama.rope.scaling.factor", F32, a.rope_factor))
    if a.alignment != 32:
        kv.append(("general.alignment", U32, a.alignment))
    content = gguf(kv + vocab_kv, make_tensors(a, types), a.version, a.alignment)
    os.makedirs(os.path.dirname(os.path.abspath(a.out)), exist_ok=True)
    part = "%s.%d.part" % (a.out, os.getpid())
    with open(part, "wb") as f:
        f.write(content)
    os.replace(part, a.out)


if __name__ == "__main__":
    main()
