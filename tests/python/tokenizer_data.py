"""Vocabularies, texts and independent encoders for the tokenizer tests. All data are made here."""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import regex

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it'll rest.",
    "Whether 'tis nobler in the mind to suffer the slings and arrows of outrageous fortune",
    "def attend(query, keys, values):\n    return softmax(query @ keys.T / 8.0) @ values\n",
    "In 1969 there were 12345 people; 3.14159 is not 22/7, they've said. WE'RE sure.",
    "Ein müder Bär schläft während der Nacht; l'été à Paris, señor, naïve café.",
    "Пример текста на русском языке для проверки разбиения на слова.",
    "日本語のテキストも中国的文字也在这里。한국어 문장도 있습니다.",
    "emoji 😀 😀🏳️‍🌈 and  double  spaces   and\ttabs\r\n\r\nlines",
    "aaaa aaaaaaa banana bananas ananas abababab http://example.org/a?b=c&d=e#f",
]

NASTY = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n",
    " \n \n\n  x",
    "a\r\n\r\nb\rc\n",
    "\x00",
    "a\x00b",
    "\x7f\x80\x9f\xa0\xad\xff",
    "trailing  ",
    "   leading",
    "tab\t\ttab \t tab",
    "'s 'S 'll 'LL 'Ve they'RE don't ''t",
    "1 12 123 1234 12345678 ½ ² Ⅷ ٣٤٥ ১২৩",
    "e\u0301 e\u0301\u0301 o\u0308 \u1e9b\u0323",
    "x\u00a0y\u3000z\u2028w\u2029v\u0085u",
    "\ufeff\u200b\u200d\u202e",
    "👩‍👩‍👧‍👦👍🏽🇩🇪 😀",
    "\U0010ffff\U000e0001\U00020000",
    "<s></s><unk><pad><0x0A><0xFF><|im_start|><|im_end|>",
    "!!!???...---===///\\\\",
    "a" * 100,
    "ab" * 60 + "ba" * 30,
    " " * 65,
    "\n" * 40,
    "x" + " " * 33 + "y",
    "日本語" * 20,
    "a\tb\t\tc \t d\t \te\t\n\t\nf",
    "\r\r\n\n\r \r\n \n\t\r\n\r\nx\r\n",
    " ".join("9876543210123"[:n] for n in range(1, 14)),
    "a1b22c333d4444e55555.5,6 7x8_9-0",
    "\u0661\u0662\u0663\u0664\u0665 \u09e7\u09e8\u09e9\u09ea \uff11\uff12\uff13\uff14 ¼½¾ ¹²³ ①②③ ⅣⅤ 〇一二",
    "iPhoneXR getHTTPResponse HTMLParser ÄÖÜßẞ Ärger ǅungla ʰaspirated ΑΒγδ ЖЗий DŽ",
    "can't CAN'T won'T 'ſ x'ſ we'Ll'D''s'S 's",  # noqa: RUF001
    "मैं हिन्दी में लिखता हूँ। สวัสดีครับ ผมชื่อ ខ្មែរ বাংলা தமிழ்",
    "שָׁלוֹם עוֹלָם! مرحبًا بالعالم، ١٢٣؟ \u202eabc\u202c",
    "q\u0323\u0307 \u0301\u0302 a\u0301b\u0308c \u1100\u1161\u11a8 \uac01 \u212b \ufb01 \u2460",
    "❤️‍🔥🧑🏽‍🚀🏴\U000e0067\U000e0062\U000e007f 1️⃣ ☺︎ 🇩🇪🇫🇷🇯🇵",
    "$5.00+€3=£8^2~`|<>\\ //path/to/x.y?z=1#é ...?!\n---\n```py\n",
    "«quoted» ‘single’ “double” – — … ！？。，、：；（）【】「」～",  # noqa: RUF001
    "<|endoftext|><|eot_id|><bos>[INST] </s>  <0x41> ▁ Ġ Ċ Ã©",
    "x\ufffdy \ufffd\ufffd",
    "a\u200cb\u200dc\u2060d\u00ade\u034ff",
    "\x01\x02\x1b[0m\x7f\x85\x9f\x0b\x0c\x1c\x1f",
    "word" + "\u00a0" * 3 + "word\u2003\u2009x\u3000\u3000y\u1680z\u180e",
    "ab" + "  " * 7 + "\n" + " " * 5 + "cd" + "\n" * 3 + " " * 4 + "ef ",
    "中文English混合text文字123数字。日本語カタカナひらがな한국어 조사",
]


def random_texts(n: int, seed: int) -> list[str]:
    """Random strings over alphabets that provoke borders: spaces, digits, apostrophes, any Unicode."""
    rng = random.Random(seed)
    words = " ".join(SENTENCES).split()
    alphabets = [
        "ab ",
        "aAbB12 \n'\t",
        " \n\r\t x",
        "'sStTlLdDmMrReEvV ",
        "äß€日本\u0301 1",
        "<|>/_s0x \u00a0",
        "abABäÄßǅʰж日\u0301' 1",
        "!?.,/$+<=>^~|` \n\ra1。",
        "\u0301\u0e34\u093fกक x1'\n",
    ]
    texts = []
    for _ in range(n):
        kind = rng.randrange(len(alphabets) + 2)
        if kind < len(alphabets):
            texts.append("".join(rng.choices(alphabets[kind], k=rng.randint(1, 40))))
        elif kind == len(alphabets):
            texts.append(" ".join(rng.choices(words, k=rng.randint(1, 12))))
        else:
            texts.append("".join(random_character(rng) for _ in range(rng.randint(1, 12))))
    return texts


def random_character(rng: random.Random) -> str:
    """Any character that old and new Unicode tables agree on (assigned in Unicode 3.2), or an emoji."""
    ranges = [(0, 0x7F), (0, 0x7F), (0x80, 0x24F), (0x250, 0xFFFF), (0x2000, 0x3100), (0x10000, 0x2FFFF)]
    while True:
        c = chr(rng.randint(*rng.choice(ranges)))
        if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs"):
            return c


def write_vocab(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file without tensors, with these tokenizer.ggml keys."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata.items():
        key = "tokenizer.ggml." + name
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def keyed(metadata: dict[str, Any]) -> dict[str, Any]:
    """The same metadata as a mapping, which a Tokenizer takes in place of a file."""
    return {"tokenizer.ggml." + name: value for name, value in metadata.items()}


def train_byte_level(vocab_size: int, words: bool = True) -> tuple[list[str], list[str]]:
    """Tokens (the first 256 are the bytes) and merges of a byte-level BPE. Without ``words`` merges go
    over spaces, digits and signs as well, so that ids show wherever a text is cut."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((SENTENCES if words else [*SENTENCES, *NASTY]) * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]


def byte_spelling() -> dict[int, str]:
    """GPT-2's character for each byte, from its definition: printable bytes are themselves."""
    spelling, other = {}, itertools.count(256)
    for b in range(256):
        own = 33 <= b <= 126 or 161 <= b <= 172 or b >= 174
        spelling[b] = chr(b) if own else chr(next(other))
    return spelling


# Written after the published descriptions, for the `regex` module, one alternative a line.
CONTRACTION = "'(?:s|t|re|ve|m|ll|d)"
ORACLE_SPLITS = {
    "gpt-2": [
        rf"""{CONTRACTION}
        | [ ]?\p{{L}}++
        | [ ]?\p{{N}}++
        | [ ]?(?:(?![\p{{L}}\p{{N}}\p{{White_Space}}]).)++
        | \p{{White_Space}}+(?=\p{{White_Space}}|\Z)
        | \p{{White_Space}}"""
    ],
    "qwen2": [
        rf"""(?i:{CONTRACTION})
        | (?:(?![\r\n\p{{L}}\p{{N}}]).)?\p{{L}}++
        | \p{{N}}
        | [ ]?(?:(?![\p{{L}}\p{{N}}\p{{White_Space}}]).)++[\r\n]*+
        | \p{{White_Space}}*[\r\n]++
        | \p{{White_Space}}+(?=\p{{White_Space}}|\Z)
        | \p{{White_Space}}"""
    ],
}
ORACLE_SPLITS["smollm"] = [r"\p{N}", *ORACLE_SPLITS["gpt-2"]]
ORACLE_SPLITS["llama-bpe"] = [ORACLE_SPLITS["qwen2"][0].replace("| \\p{N}\n", "| \\p{N}{1,3}+\n")]
ORACLE_SPLITS["qwen35"] = [
    rf"""(?i:{CONTRACTION})
    | (?:(?![\r\n\p{{L}}\p{{N}}]).)?(?:\p{{L}}|\p{{M}})++
    | \p{{N}}
    | [ ]?(?:(?![\p{{L}}\p{{M}}\p{{N}}\p{{White_Space}}]).)++[\r\n]*+
    | \p{{White_Space}}*[\r\n]++
    | \p{{White_Space}}+(?=\p{{White_Space}}|\Z)
    | \p{{White_Space}}"""
]
NOT_UPPER, NOT_LOWER = r"(?:\p{Ll}|\p{Lm}|\p{Lo}|\p{M})", r"(?:\p{Lu}|\p{Lt}|\p{Lm}|\p{Lo}|\p{M})"
ORACLE_SPLITS["tekken"] = [
    rf"""(?:(?![\r\n\p{{L}}\p{{N}}]).)?{NOT_LOWER}*{NOT_UPPER}++
    | (?:(?![\r\n\p{{L}}\p{{N}}]).)?{NOT_LOWER}+{NOT_UPPER}*+
    | \p{{N}}
    | [ ]?(?:(?![\p{{L}}\p{{N}}\p{{White_Space}}]).)++[\r\n/]*+
    | \p{{White_Space}}*[\r\n]++
    | \p{{White_Space}}+(?=\p{{White_Space}}|\Z)
    | \p{{White_Space}}"""
]
ORACLE_SPLITS["deepseek-coder"] = [
    r"[\r\n]",
    r"\p{White_Space}?\p{L}++",
    r"\p{White_Space}?\p{P}++",
    r"[\u0800-\u9fa5\uac00-\ud7ff]++",
    r"\p{N}",
]
# llama.cpp's words for files that name no rule.
ORACLE_SPLITS["default"] = [
    r"(?:\p{P}|[$+<=>^~|])++",
    *ORACLE_SPLITS["gpt-2"],
    r"\p{N}++",
    r"[0-9]{3}",
]
NORMALIZED = ("qwen2", "qwen35")


def oracle_split(text: str, pre: str) -> list[str]:
    """Words of a text by the oracle's patterns."""
    parts = [text] if text else []
    for pattern in ORACLE_SPLITS[pre]:
        compiled = regex.compile(pattern, regex.VERBOSE | regex.DOTALL | regex.V1)
        result = []
        for part in parts:
            last = 0
            for match in compiled.finditer(part):
                result += [part[last : match.start()], match[0]]
                last = match.end()
            result.append(part[last:])
        parts = [p for p in result if p]
    return parts


def oracle_byte_level(text: str, pre: str, tokens: list[str], merges: list[str]) -> list[int]:
    """The textbook algorithm: join all occurrences of the earliest merge, again and again."""
    ids = {t: i for i, t in enumerate(tokens)}
    ranks = {tuple(m.split(" ")): r for r, m in enumerate(merges)}
    spelling = byte_spelling()
    out = []
    if pre in NORMALIZED:
        text = unicodedata.normalize("NFC", text)
    for word in oracle_split(text, pre):
        symbols = [spelling[b] for b in word.encode()]
        if pre in ("llama-bpe", "tekken") and "".join(symbols) in ids:
            symbols = ["".join(symbols)]
        while len(symbols) > 1:
            best = min(itertools.pairwise(symbols), key=lambda p: ranks.get(p, len(ranks)))
            if best not in ranks:
                break
            joined: list[str] = []
            for s in symbols:
                if joined and (joined[-1], s) == best and joined[-1] is not None:
                    joined[-1:] = [joined[-1] + s, None]  # type: ignore[list-item]  # None: not to be joined again
                else:
                    joined.append(s)
            symbols = [s for s in joined if s is not None]
        out += [ids[s] for s in symbols]
    return out


def oracle_sentencepiece(text: str, scores: dict[str, float], unused: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """Pieces by SentencePiece's rule, told in full: join the best adjacent pair, the leftmost on ties."""
    symbols, parts = list(text), {}
    while True:
        pairs = [
            (-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores
        ]
        if not pairs:
            break
        i = min(pairs)[1]
        parts[symbols[i] + symbols[i + 1]] = (symbols[i], symbols[i + 1])
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]

    def split(piece: str) -> list[str]:
        if piece in unused and piece in parts:
            return [p for part in parts[piece] for p in split(part)]
        return [piece]

    return [p for s in symbols for p in split(s)]
